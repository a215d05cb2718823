"""Print which private names of other projects the package reads: `python tools/private_names.py`.

With `--check`, say which of them the libraries that are installed here do not have. A private name
may go with any release, so each has its reason here. They are read from the source: none can be
left out, and none stays listed that is no longer read. `make site` puts them into the page.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "oracle_offload"

# Versions in which every name below was found by `--check`, but for what is said to be of some.
TRIED = {
    "torch": "2.6.0, 2.13.0 and 2.14.1",
    "transformers": "5.23.0",
    "diffusers": "0.42.0",
    "Python": "3.11",
}
PUBLIC = {"_replace", "_asdict", "_fields", "_make"}  # of a namedtuple, whatever they begin with
OWN = "oracle_offload"
LOOKUPS = ("getattr", "hasattr", "setattr", "delattr")


class Note(NamedTuple):
    """Why a name is read."""

    why: str
    of: str = ""  # an expression for what has the attribute; empty where the name is a path
    only: str = ""  # the versions that have it, where not all do


_STORAGE = "torch.empty(0).untyped_storage()"
_NODE = "torch.ones(1, requires_grad=True).exp().grad_fn"
_SAVED = "torch.ones(1, requires_grad=True).relu().pow(2).grad_fn"  # of a tensor, saved
_OPERATOR = "torch.ops.aten.add.Tensor"
_TRANSFORMERS = "transformers.PreTrainedModel"

NOTES: dict[str, dict[str, Note]] = {
    "torch: which graph and which transform is running": {
        "torch._C._autograd._get_current_graph_task_keep_graph": Note(
            "What steps in backward refuses a graph that is kept: it could be run through again."
        ),
        "torch.nn.utils.clip_grad._clip_grads_with_norm_": Note(
            "Gradients of what was stepped in backward cannot be clipped: it is refused."
        ),
        "torch.nn.utils.clip_grad._get_total_norm": Note(
            "Norms of gradients that are on the host are the device's: it is given them."
        ),
        "torch._foreach_norm": Note("The function by which torch takes norms of many gradients."),
        "torch._C._current_graph_task_id": Note(
            "A device thread of autograd has no other mark of the backward that it works for."
        ),
        "torch._C._will_engine_execute_node": Note(
            "Whether a backward has a weight's accumulation in it: `torch.autograd.grad` has not."
        ),
        "_set_sequence_nr": Note("A gradient leaves as soon as it is summed.", _NODE),
        "_backward_cls": Note("The class of the nodes of a function.", "torch.autograd.Function"),
        "_post_accumulate_grad_hooks": Note(
            "Hooks that see a gradient as soon as it is set.", "torch.empty(0)"
        ),
        "torch._C._current_autograd_node": Note(
            "Which node of the joint backward is running, and so whose micro-batch."
        ),
        "_sequence_nr": Note("The order in which autograd will run nodes.", _NODE),
        "torch._C._are_functorch_transforms_active": Note(
            "Under `torch.func` a tensor is no plain one: the loan makes way."
        ),
        "torch._C._functorch.is_legacy_batchedtensor": Note(
            "A gradient of `is_grads_batched` has no address to copy from."
        ),
        "torch.autograd.forward_ad._current_level": Note(
            "Whether forward-mode derivatives are being computed, without a call per layer."
        ),
        "torch._C._get_tracing_state": Note("Whether `torch.jit.trace` is recording."),
        "torch._C._get_dispatch_mode": Note("Whether a tracer of `torch.compile` is recording."),
        "torch._C._TorchDispatchModeKey": Note("The key of that tracer."),
        "torch.autograd.profiler._is_profiler_enabled": Note(
            "Ranges are named for a profiler, and cost nothing without one."
        ),
        "torch.autograd.Variable._execution_engine.queue_callback": Note(
            "The end of a backward: only then may trained masters be written."
        ),
    },
    "torch: dispatch": {
        "torch._C._SetExcludeDispatchKeyGuard": Note(
            "Operators run with the caller's keys: inside a handle autocast is excluded."
        ),
        "torch._C._AutoDispatchBelowAutograd": Note(
            "A derivative that is an operator of its own records nothing."
        ),
        "torch._C._after_autograd_keyset": Note("The same, for an operator that is called again."),
        "torch._C._DisableTorchDispatch": Note(
            "Views of a slot are none of the module's operators: selective checkpoints count those."
        ),
        "torch._C._disabled_torch_function_impl": Note(
            "A handle arrives in dispatch alone; functions see an ordinary tensor."
        ),
        "torch._C.DisableTorchFunctionSubclass": Note(
            "The bytes of a subclass are read without its own functions."
        ),
        "torch._C.DispatchKey": Note("The keys by name."),
        "torch._C._is_any_autocast_enabled": Note(
            "Whether autocast is on for any type of device, in one call."
        ),
        "torch._C._dispatch_has_kernel_for_dispatch_key": Note(
            "Whether an operator is composite, and so runs with the caller's keys."
        ),
        "torch._C._get_privateuse1_backend_name": Note("The keys of a device of another make."),
        "torch._ops.OpOverload": Note("The type of what a dispatch mode is handed."),
        "_overloadpacket": Note("What flop counters are registered for.", _OPERATOR),
        "torch.ops.aten._unsafe_view": Note("The reshape that `F.linear` records for a batch."),
        "torch.ops.aten._unsafe_view.default": Note(
            "A handle of a handle: its geometry alone changes."
        ),
        "torch.ops.aten._reshape_alias.default": Note("The same."),
        "torch.ops.aten._to_copy.default": Note("A cast of a handle is a handle."),
        "torch.utils._python_dispatch.TorchDispatchMode": Note(
            "Public in practice: what PyTorch's own pages subclass."
        ),
        "torch._subclasses.fake_tensor.FakeTensorMode": Note(
            "Shapes of what a model computes, without memory for it."
        ),
        "torch._subclasses.fake_tensor.DynamicOutputShapeException": Note(
            "A layer whose output has no shape before it is computed is lent as a module."
        ),
        "torch.utils._pytree.tree_map": Note("Tensors in whatever a module returns."),
    },
    "torch: tensors and storages": {
        "_version": Note("Whether a weight was written since its copy.", "torch.empty(0)"),
        "_is_view": Note(
            "A convolution of one axis returns a view, which no function may.", "torch.empty(0)"
        ),
        "_cdata": Note("Whether two tensors have one storage.", _STORAGE),
        "torch._C._storage_Use_Count": Note("Whether other code holds the memory of a weight."),
        "torch.UntypedStorage._new_with_weak_ptr": Note(
            "A coded weight that no code reads lets its decoded memory go."
        ),
        "torch._C._from_dlpack": Note("A tensor over a slot, in one call of C."),
        "torch._C._swap_tensor_impl": Note(
            "`swap_tensors` refuses what is held weakly, as a GRU holds its weights."
        ),
        "torch.Tensor._make_subclass": Note("A Parameter over memory that is lent."),
        "torch.Tensor._make_wrapper_subclass": Note("A handle: a tensor without bytes."),
        "torch._C._set_throw_on_mutable_data_ptr": Note(
            "An address of a handle is an error in C++ too, no null pointer."
        ),
        "_indices": Note(
            "A sparse gradient as it is: `indices()` would coalesce it.",
            "torch.ones(2).to_sparse()",
        ),
        "_backward_hooks": Note(
            "Hooks of a weight, which would see a sum of micro-batches.", "torch.empty(0)"
        ),
    },
    "torch: saved tensors": {
        "torch._C._autograd._saved_tensors_hooks_is_enabled": Note(
            "Whether hooks may be set here."
        ),
        "torch._C._autograd._saved_tensors_hooks_enable": Note(
            "Put back what an exception has left."
        ),
        "torch._C._autograd._saved_tensors_hooks_disable": Note("The same."),
        "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message": Note("The same."),
        "torch._C._autograd._push_saved_tensors_default_hooks": Note(
            "What a lent module saves is noted, not copied."
        ),
        "torch._C._autograd._pop_saved_tensors_default_hooks": Note("The other end of it."),
        "torch._C._autograd._top_saved_tensors_default_hooks": Note(
            "Hooks from outside go on being called.", only="torch >= 2.8"
        ),
        "_raw_saved_tensors": Note(
            "A saved tensor that is packed once, by a node of ours.", "torch._C._FunctionBase"
        ),
        "_saved_self": Note("Which cast of a weight autocast remembers.", _SAVED),
    },
    "torch: modules": {
        "_conv_forward": Note("What a convolution computes.", "torch.nn.Conv2d"),
        "_reversed_padding_repeated_twice": Note(
            "Its padding as `F.pad` takes it.", "torch.nn.Conv2d(1, 1, 1, padding_mode='circular')"
        ),
        "_flat_weights_names": Note(
            "The weights of an RNN in cuDNN's order.", "torch.nn.GRU(1, 1)"
        ),
        "_forward_hooks": Note(
            "A module whose call has hooks is no plain one.", "torch.nn.Module()"
        ),
        "_non_persistent_buffers_set": Note("Buffers that no file has.", "torch.nn.Module()"),
        "torch.nn.Module._call_impl": Note("The frame of a module's call."),
        "torch.nn.modules.batchnorm._NormBase": Note("Norms with statistics of the batch."),
    },
    "torch: the state of a thread, taken and put back for each micro-batch": {
        "torch._C._set_grad_enabled": Note("`set_grad_enabled` in one call of C."),
        "torch._C._is_fwd_grad_enabled": Note("Forward-mode derivatives."),
        "torch._C._set_fwd_grad_enabled": Note("The same."),
        "torch._C._is_multithreading_enabled": Note("Device threads of autograd."),
        "torch._C._set_multithreading_enabled": Note("The same."),
        "torch._C._is_view_replay_enabled": Note("How views are recomputed."),
        "torch._C._set_view_replay_enabled": Note("The same."),
        "torch._C._autocast_supported_devices": Note(
            "Device types that have an autocast.", only="torch >= 2.7"
        ),
        "torch.overrides._get_current_function_mode_stack": Note("Function modes."),
        "torch.overrides._push_mode": Note("The same."),
        "torch.overrides._pop_mode": Note("The same."),
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack": Note("Dispatch modes."),
        "torch.utils._python_dispatch._push_mode": Note("The same."),
        "torch.utils._python_dispatch._pop_mode": Note("The same."),
        "torch.utils._python_dispatch.set_is_in_mode_without_ignore_compile_internals": Note(
            "A flag next to the stack of modes.", only="torch >= 2.9"
        ),
        "_dispatch_key": Note(
            "Which stack a mode is in, in a mode that has one.", only="torch < 2.7"
        ),
        "_mode_key": Note("The same."),
        "torch._C._get_fp32_precision_getter": Note(
            "The precision of float32 products, by library.", only="torch >= 2.9"
        ),
        "torch._C._set_fp32_precision_setter": Note("The same.", only="torch >= 2.9"),
        "torch.utils.checkpoint._checkpoint_hook": Note(
            "Recomputation belongs to the micro-batch whose forward it repeats."
        ),
        "torch.utils.checkpoint._CheckpointFrame": Note("The same."),
    },
    "torch: compiling": {
        "torch._C._dynamo.eval_frame.set_eval_frame": Note(
            "Code of ours in the middle of a compiled call is not compiled."
        ),
    },
    "torch: several processes": {
        "torch.distributed.distributed_c10d._get_default_store": Note(
            "Where ranks say how they meet, without a port of our own."
        ),
    },
    "torch: CUDA": {
        "torch._C._cuda_getCurrentRawStream": Note(
            "The current stream's handle, in one call.", only="CUDA builds"
        ),
        "torch._C._cuda_attach_out_of_memory_observer": Note(
            "A snapshot when memory runs out.", only="CUDA builds"
        ),
        "torch._C._cuda_isHistoryEnabled": Note(
            "Whether other code records memory.", only="CUDA builds"
        ),
        "torch.cuda.memory._record_memory_history": Note(
            "Public in practice: PyTorch's page on memory snapshots begins with it."
        ),
        "torch.cuda.memory._snapshot": Note("The same."),
        "_accelerator_getAllocatorSettings": Note(
            "The allocator's settings in effect.", "torch._C", "torch >= 2.9"
        ),
        "_accelerator_setAllocatorSettings": Note("The same.", "torch._C", "torch >= 2.9"),
        "torch._C._host_emptyCache": Note("Pinned memory is given back.", only="CUDA builds"),
        "_set_allocator_settings": Note("Settings before 2.9.", "torch.cuda.memory"),
        "torch.amp.grad_scaler._MultiDeviceReplicator": Note("Its copies to the host do not wait."),
        "_per_device_tensors": Note(
            "What it has copied.", "torch.amp.grad_scaler._MultiDeviceReplicator(torch.ones(1))"
        ),
    },
    "Other libraries": {
        "_fix_state_dict_keys_on_load": Note(
            "Old names in files of diffusers.", "diffusers.ModelMixin"
        ),
        "_supports_gradient_checkpointing": Note(
            "Whether it may be asked.", "diffusers.ModelMixin"
        ),
        "_from_config": Note("A model without values.", _TRANSFORMERS),
        "_keep_in_fp32_modules": Note("Layers that stay float32 in float16.", _TRANSFORMERS),
        "_keep_in_fp32_modules_strict": Note("And in bfloat16.", _TRANSFORMERS),
        "_keys_to_ignore_on_load_unexpected": Note("Names of a file to pass over.", _TRANSFORMERS),
        "_params_refs": Note(
            "The parameters that an average of torch-ema, as AI-Toolkit has it, was made of."
        ),
    },
    "Python": {
        "copyreg._reconstructor": Note("A deep copy is of the class that the user knows."),
        "sys._getframe": Note("The caller's file, for a message and for exemption."),
        "sys._current_frames": Note("What other threads are doing."),
        "_thread.RLock": Note("The type of such a lock, which `threading` has no name for."),
        "_is_owned": Note("Whether this thread holds a lock.", "threading.RLock()"),
    },
}


class Read(NamedTuple):
    """A private name that a file of the package reads."""

    name: str
    path: str  # of the file, below `oracle_offload`
    may_lack: bool  # it is asked for with a default, or after `hasattr`


def notes() -> dict[str, Note]:
    """Return what is said of each name."""
    return {name: note for section in NOTES.values() for name, note in section.items()}


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.endswith("__")


def own_names(trees: list[ast.Module]) -> set[str]:
    """Return every name that the package itself gives to something."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return found


class Reader:
    """What one file reads, or one function of it.

    Parameters
    ----------
    tree : ast.Module or ast.FunctionDef
        The file, or the function.
    own : set of str
        Names that are the package's.
    paths : dict
        What a name outside the function means, by name.
    """

    def __init__(self, tree: ast.AST, own: set[str], paths: dict[str, str] | None = None) -> None:
        self._own = own
        self._paths = dict(paths or {})
        self._functions: list[ast.AST] = []
        self._nodes: list[ast.AST] = []
        waiting = list(ast.iter_child_nodes(tree))
        while waiting:
            node = waiting.pop(0)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                self._functions.append(node)
            else:
                self._nodes.append(node)
                waiting += ast.iter_child_nodes(node)

    def reads(self) -> Iterator[tuple[str, bool]]:
        """Yield each private name, and whether the file can do without."""
        for node in self._nodes:
            yield from self._imported(node)
        for node in self._nodes:  # `_autograd = torch._C._autograd`
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                path = self._path(node.value)
                if path and isinstance(target, ast.Name):
                    self._paths[target.id] = path
        for node in self._nodes:
            if isinstance(node, ast.Attribute):
                yield from self._attribute(node.value, node.attr, may_lack=False)
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in LOOKUPS
                and isinstance(node.args[1], ast.Constant)
            ):
                may_lack = len(node.args) == 3 or node.func.id == "hasattr"
                yield from self._attribute(node.args[0], str(node.args[1].value), may_lack)
        for function in self._functions:
            yield from Reader(function, self._own, self._paths).reads()

    def _imported(self, node: ast.AST) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            paths = {(name.asname or name.name.split(".")[0]): name.name for name in node.names}
            for name in node.names:
                if not name.asname:
                    paths[name.name.split(".")[0]] = name.name.split(".")[0]
                if any(map(is_private, name.name.split("."))):
                    yield self._cut(name.name), False
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            paths = {
                (name.asname or name.name): f"{node.module}.{name.name}" for name in node.names
            }
            yield from (
                (self._cut(path), False)
                for path in paths.values()
                if any(map(is_private, path.split("."))) and not path.startswith(OWN)
            )
        else:
            return
        self._paths.update(paths)

    def _attribute(self, of: ast.expr, name: str, may_lack: bool) -> Iterator[tuple[str, bool]]:
        path = self._path(of)
        if path:
            if any(map(is_private, f"{path}.{name}".split("."))) and not path.startswith(OWN):
                yield self._cut(f"{path}.{name}"), may_lack
        elif is_private(name) and name not in self._own | PUBLIC:
            yield name, may_lack

    def _cut(self, path: str) -> str:
        """Return a path up to the class that it leads to: what that holds is public."""
        parts = [part for part in path.split(".") if not part.endswith("__")]
        first = next(number for number, part in enumerate(parts) if is_private(part))
        for number, part in enumerate(parts):
            if number >= first and part.lstrip("_")[0].isupper() and part != "_C":
                return ".".join(parts[: number + 1])
        return ".".join(parts)

    def _path(self, node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            of = self._path(node.value)
            return of and f"{of}.{node.attr}"
        return self._paths.get(node.id, "") if isinstance(node, ast.Name) else ""


def reads() -> list[Read]:
    """Return every private name that the package reads, with each file that does."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    stub = ast.parse((PACKAGE / "_core.pyi").read_text("utf-8"))
    own = own_names([*trees.values(), stub])
    found = []
    for path, tree in trees.items():
        lacking: dict[str, bool] = {}
        for name, may_lack in Reader(tree, own).reads():
            lacking[name] = lacking.get(name, True) and may_lack
        for name, may_lack in lacking.items():
            if not any(other.startswith(f"{name}.") for other in lacking):  # a part of a path
                found.append(Read(name, path.relative_to(PACKAGE).as_posix(), may_lack))
    return found


def has(name: str, note: Note) -> bool | None:
    """Say whether the libraries here have a name; None where the library is not installed."""
    parts = (note.of or name).split("(")[0].split(".")
    try:
        library = importlib.import_module(parts[0])
    except ImportError:
        return None
    if note.of:
        importlib.import_module("torch.amp.grad_scaler")
        return hasattr(eval(note.of, {parts[0]: library, "torch": sys.modules["torch"]}), name)
    found: Any = library
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:number]))
            except ImportError:
                return False
        found = getattr(found, part)
    return True


def lacking() -> list[str]:
    """Return which names the libraries that are installed here do not have, and should."""
    return [name for name, note in notes().items() if not note.only and has(name, note) is False]


def printed() -> str:
    """Return the tables of the page."""
    files: dict[str, list[str]] = {}
    for read in reads():
        files.setdefault(read.name, []).append(read.path)
    tried = ", ".join(f"{name} {versions}" for name, versions in TRIED.items())
    out = [f"All were found in {tried}, but for those of which another range is said.", ""]
    for section, rows in NOTES.items():
        out += [f"## {section}", "", "| name | of | why | where |", "| --- | --- | --- | --- |"]
        for name, note in rows.items():
            why = note.why + (f" ({note.only})" if note.only else "")
            of = f"`{note.of}`" if note.of else ""
            out.append(f"| `{name}` | {of} | {why} | {', '.join(files.get(name, []))} |")
        out.append("")
    return "\n".join(out)


if __name__ == "__main__":
    if "--check" in sys.argv:
        missing = lacking()
        print("\n".join(missing) or f"{len(notes())} names: none is missing")
        raise SystemExit(3 if missing else 0)
    print(printed(), end="")
