from __future__ import annotations

from bench.kernel_cases import all_cases
from bench.kernels import table


def test_ratios_are_medians_of_the_ratios_within_a_turn():
    """The medians of the two implementations lie in different turns, so the ratio of medians is another number."""
    case = next(case for case in all_cases(True) if case.kernel == "prefix_attention")
    ours, reference = [1.0, 2.0, 10.0], [3.0, 20.0, 40.0]
    rows = {row["implementation"]: row for row in table(case, {"cpu": ours, "reference": reference})}
    assert rows["cpu"]["ratio"] is None and rows["reference"]["ratio"] == "4.000"
    assert float(rows["reference"]["median_s"]) / float(rows["cpu"]["median_s"]) == 10.0
    assert {(row["kernel"], row["dtype"], row["rounds"]) for row in rows.values()} == {
        ("prefix_attention", "float32", 3)
    }
