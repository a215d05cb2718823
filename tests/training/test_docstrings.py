"""The examples in the docstrings of what users call first run as they are written."""

import doctest
import inspect

import pytest
import torch

import oracle_offload

SHOWN = ["attach", "memory_summary", "record", "plan"]


@pytest.mark.parametrize("name", SHOWN)
def test_its_example_runs(name):
    shown = getattr(oracle_offload, name)
    names = {"oracle_offload": oracle_offload, "torch": torch}
    found = doctest.DocTestParser().get_doctest(inspect.getdoc(shown), names, name, None, None)
    assert len(found.examples) >= 2
    said = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(found, out=said.append)
    assert not runner.failures, "".join(said)


@pytest.mark.parametrize("name", SHOWN)
def test_its_docstring_names_every_parameter(name):
    shown = getattr(oracle_offload, name)
    told = inspect.getdoc(shown).split("Parameters\n")[1].split("\nReturns\n")[0]
    named = {
        each.strip().lstrip("*")
        for line in told.splitlines()
        for each in line.partition(" :")[0].split(",")
    }
    assert set(inspect.signature(shown).parameters) <= named
