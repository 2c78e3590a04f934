"""The files for containers name options and metrics paths that exist; containers themselves are not built here."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from diffscore_fast.cli.main import main

ROOT = Path(__file__).parents[2]


def test_the_containers_start_the_service_with_options_that_exist():
    known = {name for option in main.commands["serve"].params for name in option.opts}
    compose = yaml.safe_load((ROOT / "examples/service/compose.yaml").read_text())
    used = re.findall(r"--[a-z-]+", " ".join(compose["services"]["diffscore"]["command"]))
    start = re.search(r"^ENTRYPOINT (.*)$", (ROOT / "Dockerfile").read_text(), re.M)[1]
    used += re.findall(r"--[a-z-]+", start)
    assert len(used) == 3 and set(used) <= known
    prometheus = yaml.safe_load((ROOT / "examples/service/prometheus.yaml").read_text())
    (job,) = prometheus["scrape_configs"]
    host = job["static_configs"][0]["targets"][0].partition(":")[0]
    assert host in compose["services"]["diffscore"]["command"]
    secret = "/run/secrets/token"
    assert secret in compose["services"]["diffscore"]["command"] and job["authorization"]["credentials_file"] == secret
