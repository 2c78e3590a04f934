"""Coverage of the bounds' intervals with few orders, on random lattices whose exact likelihood is known. No model.

`python -m bench.few_orders` prints, for K = M orders and both designs, how often the exact value lies outside [lower -
w se, upper + w se], with w = 3 and with the quantile of Student's t that has the same probability. It also prints the
width of the interval and the share of blocks that are called unreliable. A block whose few draws are all equal has no
interval, so it cannot miss. The run takes about a minute on one core; its output is in bench/results/few_orders.txt.
"""

from __future__ import annotations

from dataclasses import dataclass

import click
import numpy as np

from diffscore_fast.bounds.config import BoundsConfig
from diffscore_fast.bounds.evidence import sampled_bounds
from diffscore_fast.bounds.intervals import student_widths
from diffscore_fast.bounds.lattice import exact_log_likelihood
from diffscore_fast.bounds.orders import Generation, OrderDesign, draw_steps, visible_before

ORDERS = (2, 4, 8, 12)
SPREAD = {4: 0.4, 8: 0.35}  # sd of a token's log-prob over states; log p(x | order) then has about 0.8 and 1.0
Z = 3.0


@dataclass(frozen=True)
class Coverage:
    """Shares of (block, seed) pairs, and a median.

    Parameters
    ----------
    outside_normal, outside_student : float
        Exact value outside the interval with w = 3, and with Student's t.
    worst_normal, worst_student : float
        The same, for the block with the largest share.
    outside_reliable : float
        Outside the interval with Student's t, and not called unreliable.
    unreliable : float
    width : float
        Median width of the interval with Student's t, in nats per block.
    """

    outside_normal: float
    outside_student: float
    worst_normal: float
    worst_student: float
    outside_reliable: float
    unreliable: float
    width: float


def coverage(block_size: int, orders: int, design: OrderDesign, blocks: int, seeds: int) -> Coverage:
    """Any-order bounds of random lattices, cross-fitted over K + M draws as by default."""
    generator = np.random.default_rng(block_size)
    table = np.minimum(generator.normal(-3.0, SPREAD[block_size], (blocks, 1 << block_size, block_size)), 0.0)
    exact = exact_log_likelihood(table, Generation())
    config = BoundsConfig(orders=orders, surrogate_orders=orders, design=design)
    block, trial = np.repeat(np.arange(blocks), seeds), np.tile(np.arange(seeds), blocks)
    keys = (np.uint64(7919) * block.astype(np.uint64) << np.uint64(20)) + trial.astype(np.uint64)
    places = np.tile(np.arange(block_size), (len(keys), 1))
    steps = draw_steps(keys, places, np.ones_like(places, bool), config.draws, design, Generation())
    log_p = table[block[:, None, None], visible_before(steps), np.arange(block_size)].sum(axis=2)
    found = sampled_bounds(config, log_p, np.full(len(keys), block_size), np.full(len(keys), np.nan))

    def outside(widths: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
        low, high = found.lower.value - widths * found.lower.stderr, found.upper.value + widths * found.upper.stderr
        return (exact[block] < low - 1e-9) | (exact[block] > high + 1e-9), high - low

    normal, _ = outside(Z)
    student, width = outside(student_widths(Z, found.degrees_of_freedom))
    unreliable = found.few_draws | (found.effective_draws < 2.0)
    return Coverage(
        normal.mean(),
        student.mean(),
        normal.reshape(blocks, seeds).mean(1).max(),
        student.reshape(blocks, seeds).mean(1).max(),
        (student & ~unreliable).mean(),
        unreliable.mean(),
        float(np.nanmedian(width)),
    )


@click.command()
@click.option("--blocks", default=20, show_default=True, help="Random lattices.")
@click.option("--seeds", default=500, show_default=True, help="Seeds of each.")
def main(blocks: int, seeds: int) -> None:
    """Print the table."""
    print(f"{blocks} lattices x {seeds} seeds; exact value outside the interval, z = {Z:g}: share (worst lattice)")
    print("L'  design       K = M  w = 3            Student's t      and not unreliable  unreliable  median width")
    for block_size in SPREAD:
        for design in ("independent", "antithetic"):
            for orders in ORDERS:
                found = coverage(block_size, orders, design, blocks, seeds)  # type: ignore[arg-type]
                print(
                    f"{block_size:<3} {design:<12} {orders:>5}  "
                    f"{found.outside_normal:6.2%} ({found.worst_normal:6.2%})  "
                    f"{found.outside_student:6.2%} ({found.worst_student:6.2%})  {found.outside_reliable:18.2%}  "
                    f"{found.unreliable:10.1%}  {found.width:12.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
