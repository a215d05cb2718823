"""Which hooks attach refuses, recognised by the names that accelerate and diffusers give them.

`tests/clients/test_hooks.py` does it with the libraries themselves.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from equality import attached
from torch import nn

import oracle_offload
from oracle_offload import OffloadError

ALIGN = type("AlignDevicesHook", (), {"__module__": "accelerate.hooks"})
OFFLOAD = type("CpuOffload", (), {"__module__": "accelerate.hooks"})
DERIVED = type("Mine", (ALIGN,), {"__module__": "mine"})
NAMESAKE = type("CpuOffload", (), {"__module__": "mine"})
HARMLESS = type("LayerwiseCastingHook", (), {"__module__": "accelerate.hooks"})
REMOVE = (
    "accelerate.hooks.remove_hook_from_module(model, recurse=True), or with "
    "pipe.remove_all_hooks() where a pipeline put it there"
)


def model_with(attribute, *hooks):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(max(2, len(hooks)))))
    for module, hook in zip(model, hooks, strict=False):
        setattr(module, attribute, hook)
    return model


def refusal(model):
    with pytest.raises(OffloadError) as refused:
        oracle_offload.attach(model, "cpu")
    return str(refused.value)


@pytest.mark.parametrize("hook", [ALIGN(), DERIVED(), SimpleNamespace(hooks=[HARMLESS(), ALIGN()])])
def test_a_hook_that_moves_weights_is_refused_with_the_call_that_removes_it(hook):
    assert refusal(model_with("_hf_hook", hook)) == (
        "Sequential has hooks that move its weights themselves, which attach replaces. "
        f"accelerate's AlignDevicesHook on '0': take it off with {REMOVE}. Then attach again."
    )


@pytest.mark.parametrize("hook", [NAMESAKE(), HARMLESS(), SimpleNamespace(hooks=[HARMLESS()])])
def test_other_hooks_stay(hook):
    with attached(model_with("_hf_hook", hook)) as manager:
        assert len(manager.layers) == 2


@pytest.mark.parametrize(("count", "more"), [(3, ""), (4, " and 1 more"), (9, " and 6 more")])
def test_three_carriers_are_named_and_the_others_counted(count, more):
    said = refusal(model_with("_hf_hook", *[OFFLOAD() for _ in range(count)]))
    assert f"accelerate's CpuOffload on '0', '1', '2'{more}: take it off" in said


def test_every_kind_of_hook_is_named_once_with_its_own_remedy():
    names = ("group_offloading", "lazy_prefetch_group_offloading")
    registry = SimpleNamespace(hooks=dict.fromkeys((*names, "faster_cache")))
    model = model_with("_diffusers_hook", registry, registry)
    model[0]._hf_hook = ALIGN()
    said = refusal(model)
    for name in names:
        call = f"HookRegistry.check_if_exists_or_initialize(model).remove_hook('{name}')"
        assert f"diffusers' {name} on '0', '1': take it off with diffusers.hooks.{call}" in said
    assert said.count("take it off") == 3 and "faster_cache" not in said
