"""On a mesh of eight devices, simulated on the CPU: state lies as parameters do, and a step does not communicate."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sharded_program import NAMES


@pytest.fixture(scope="module")
def report():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    program = Path(__file__).with_name("sharded_program.py")
    result = subprocess.run(
        [sys.executable, program], check=False, capture_output=True, text=True, env=environment, timeout=110
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_a_collective_would_be_found(report):
    assert report["a sum"]["collectives"] == ["all-reduce"]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_does_not_communicate_and_the_state_lies_as_the_parameters(report, name):
    assert report[name]["collectives"] == []
    assert report[name]["sharded like the parameters"]
    assert report["scales"]


@pytest.mark.parametrize("name", ["normal", "bfloat16"])
def test_the_numbers_are_those_of_one_device(report, name):
    assert report[name]["largest difference"] <= 1e-6
