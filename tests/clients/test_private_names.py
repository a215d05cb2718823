"""The page of private names: complete, and true of what is installed."""

from __future__ import annotations

import ast

import private_names
import pytest

FILE = """
import torch
from torch.utils import checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode
_hooks = torch._C._autograd
def read(model):
    import transformers as model
    return model._one, _hooks._two, getattr(checkpoint, "_three", None)
def lookup(model):
    self._own = model._four, model._replace(), torch._C.DispatchKey.CPU, model.__dict__
"""


def test_every_private_name_has_a_reason_and_every_reason_a_reader() -> None:
    assert {read.name for read in private_names.reads()} == set(private_names.notes())


def test_none_is_missing_in_what_is_installed() -> None:
    pytest.importorskip("torch")
    assert private_names.lacking() == []


def test_a_missing_name_is_told() -> None:
    pytest.importorskip("torch")
    gone = private_names.Note("It was there once.")
    assert private_names.has("torch._C._nobody_has_this", gone) is False
    assert private_names.has("_nobody_has_this", gone._replace(of="torch.nn.Module()")) is False
    assert private_names.has("no_such_library._name", gone) is None


def test_names_are_read_through_imports_functions_and_lookups() -> None:
    tree = ast.parse(FILE)
    found = private_names.Reader(tree, private_names.own_names([tree])).reads()
    assert sorted(set(found)) == [
        ("_four", False),
        ("torch._C", False),
        ("torch._C.DispatchKey", False),
        ("torch._C._autograd", False),
        ("torch._C._autograd._two", False),
        ("torch._subclasses.fake_tensor.FakeTensorMode", False),
        ("torch.utils.checkpoint._three", True),
        ("transformers._one", False),
    ]
