"""Which lines of a model's source use a weight directly, and which are certain to be come by."""

from __future__ import annotations

import importlib.util
import itertools
import textwrap

import pytest
from torch import nn

from oracle_offload.direct_uses import direct_uses, used_directly

_serial = itertools.count()


@pytest.fixture
def model_of(tmp_path):
    """Make a class of a source: what stands in a class body, over the bases that it names."""

    def make(body, bases="nn.Module", before=""):
        name = f"read_{next(_serial)}"
        path = tmp_path / f"{name}.py"
        lines = textwrap.indent(textwrap.dedent(body), "    ")
        path.write_text(
            f"from torch import nn\nimport torch\n{textwrap.dedent(before)}\n"
            f"class Model({bases}):\n{lines}\n"
        )
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.Model

    return make


def found(cls):
    return {(".".join(use.path), use.certain) for use in direct_uses(cls)}


@pytest.mark.parametrize(
    ("line", "uses"),
    [
        ("return x @ self.a.weight", {("a", True)}),
        ("return x + self.a.bias", {("a", True)}),
        ("return x @ self.blocks[0].a.weight", {("blocks.*.a", True)}),
        ("return self.a.weight.t() @ self.b.weight", {("a", True), ("b", True)}),
        ("return torch.empty(0, device=self.a.weight.device)", {("a", True)}),
        ("return self.a(x)", set()),
        ("return other.a.weight", set()),
        ("return self.weight", set()),
        ("return self.a.scale", set()),
        # Harmless: asks for nothing that lies in the weight's memory.
        ("return x.to(self.a.weight.dtype)", set()),
        ("return x.view(self.a.weight.shape)", set()),
        ("return isinstance(self.a.weight, nn.Parameter)", set()),
        ("return hasattr(x, 'y') and len(self.a.weight)", set()),
        ("return self.a.weight is None", set()),
        ("return None is not self.a.bias", set()),
        ("return print(self.a.weight)", {("a", True)}),
        ("return self.a.weight == None", {("a", True)}),
        ("return self.a.weight is x is not (y > 0)", set()),
        ("return self.a.weight is x == y", {("a", True)}),
        # Harmless: writes the weight in place, on the host.
        ("self.a.weight.data.mul_(2)", set()),
        ("self.a.weight.data[0].mul_(2).add_(1)", set()),
        ("self.a.weight.data[0] = 1", set()),
        ("self.a.weight.data = self.b.weight", set()),
        ("self.a.weight.data *= 2", set()),
        ("self.a.weight[0] = self.b.weight[0] = 1", set()),
        ("y = self.a.weight", {("a", True)}),
        ("y = self.a.weight.data[0] = 1", {("a", True)}),
        ("self.a.weight.mul(2)", {("a", True)}),
        ("self.a.weight.__len__()", {("a", True)}),
        ("return self.a.weight.mul_(2)", {("a", True)}),
        ("x[0] = self.a.weight", {("a", True)}),
        ("self.a.weight.data += self.b.weight", set()),
        # But what is written in place is no weight, or a copy of one.
        ("x.add_(self.a.weight)", {("a", True)}),
        ("self.a.weight.clone().mul_(2)", {("a", True)}),
        ("print(self.a.weight).mul_(2)", {("a", True)}),
        ("x.add(self.a.weight)", {("a", True)}),
        ("print(self.a.weight)", {("a", True)}),
        ("self.a.weight", {("a", True)}),
        ("self.b.scale = self.a.weight", {("a", True)}),
        ("y += self.a.weight", {("a", True)}),
        ("y, self.b.weight.data = self.a.weight, x", {("a", True), ("b", True)}),
        ("return (x + y).weight", set()),
        ("return x.type(self.a.weight)", {("a", True)}),
        ("return type(self.a.weight), len(x)", set()),
        ("return self.a.weight.grad.grad + self.b.weight.device.type", {("b", True)}),
        ("return self.blocks[0][x](y).weight", set()),
        ("return self.blocks[self.a.weight.shape[0]](x)", set()),
        # Branches may never be taken; what decides them is come by.
        ("if x: return self.a.weight", {("a", False)}),
        ("if self.a.weight.sum(): return x", {("a", True)}),
        ("return self.a.weight if x else self.b.weight", {("a", False), ("b", False)}),
        ("return x if self.a.weight.any() else y", {("a", True)}),
        ("return self.a.weight.any() or self.b.weight.any()", {("a", True), ("b", False)}),
        ("return x and self.a.weight.any()", {("a", False)}),
        ("for _ in x: y = self.a.weight", {("a", True)}),
        ("with x: y = self.a.weight", {("a", True)}),
    ],
)
def test_what_counts_as_a_use(model_of, line, uses):
    found_uses = found(model_of(f"def forward(self, x, y=None, other=None):\n    {line}\n"))
    assert found_uses == uses


def test_handlers_and_cases_are_branches(model_of):
    cls = model_of(
        """
        def forward(self, x):
            try:
                y = self.a.weight
            except ValueError:
                y = self.b.weight
            else:
                y = self.c.weight
            finally:
                z = self.d.weight
            match x:
                case 0:
                    return self.e.weight
                case _:
                    return self.f.weight
        """
    )
    sure, unsure = {"a", "c", "d"}, {"b", "e", "f"}
    assert found(cls) == {(n, True) for n in sure} | {(n, False) for n in unsure}


def test_methods_that_are_called_are_read_with_the_certainty_of_the_call(model_of):
    cls = model_of(
        """
        def forward(self, x):
            if x:
                self.perhaps()
            return self.surely()
        def surely(self):
            return self.a.weight, self.later()
        def perhaps(self):
            return self.b.weight, self.later()
        def later(self):
            return self.c.weight
        def never(self):
            return self.d.weight
        """
    )
    assert found(cls) == {("a", True), ("b", False), ("c", True)}
    assert {use.where for use in direct_uses(cls)} == {
        "Model.surely", "Model.perhaps", "Model.later",
    }  # fmt: skip


def test_what_is_overridden_is_read_where_super_is_asked(model_of):
    before = """
    class Base(nn.Module):
        def forward(self, x):
            return self.base.weight
    """
    own = "def forward(self, x):\n    return self.own.weight"
    assert found(model_of(own, "Base", before)) == {("own", True)}
    asking = "def forward(self, x):\n    return self.own.weight, super().forward(x)"
    assert found(model_of(asking, "Base", before)) == {("own", True), ("base", True)}
    assert found(model_of("pass", "Base", before)) == {("base", True)}


def test_a_use_is_named_by_the_line_that_reads(model_of, tmp_path):
    cls = model_of(
        """
        def forward(self, x):
            return (
                x
                + self.a.weight
            )
        """
    )
    (use,) = direct_uses(cls)
    file, line = use.site
    with open(file, encoding="utf-8") as source:
        assert "self.a.weight" in source.read().splitlines()[line - 1]
    assert use.where == "Model.forward"


def test_a_class_whose_source_is_not_there_has_no_uses_that_can_be_read():
    space = {"nn": nn}
    exec("class Model(nn.Module):\n def forward(self, x):\n  return x @ self.a.weight", space)
    assert direct_uses(space["Model"]) == ()


def test_uses_are_those_of_the_layers_they_lead_to(model_of):
    cls = model_of(
        """
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2)
            self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            self.plain = object()
        def forward(self, x):
            y = self.a.weight, self.norm.weight, self.blocks[0].weight, self.gone.weight
            if x:
                return self.b.weight, self.a.bias, self.plain.weight
        """
    )
    model = cls()
    uses = used_directly(model.modules())
    expected = {model.a: True, model.b: False, model.blocks[0]: True, model.blocks[1]: True}
    expected[model.norm] = True
    assert {key: used.certain for key, used in uses.items()} == {
        id(module): certain for module, certain in expected.items()
    }
    assert len(uses[id(model.a)].sites) == 2
    assert {*uses[id(model.b)].sites.values()} == {"Model.forward"}
    assert uses[id(model.a)].users == {id(model): model} and not uses[id(model.b)].users


def test_a_use_through_an_adapter_is_one_of_the_layer_behind_it(model_of):
    cls = model_of("def forward(self, x):\n    return self.a.weight, self.b.base_layer.weight")
    model = cls()
    for name in "ab":
        inner, outer = nn.Module(), nn.Module()
        inner.base_layer, outer.base_layer = nn.Linear(2, 2), inner
        setattr(model, name, outer)
    uses = used_directly(model.modules())
    layers = [getattr(model, name).base_layer.base_layer for name in "ab"]
    assert set(uses) == {id(layer) for layer in layers}
