"""Print what the site has of every error of the package: `python tools/errors_page.py`.

`--missing` lists the places for which `NOTES` has no cause and remedy.

Every error of `oracle_offload/` and every failure of `csrc/` is read from the source: none can be
left out. `make site` puts it into the page of errors.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

# A piece of the message, as the page shows it, and what to say of it; by section.
NOTES: dict[str, dict[str, str]] = {
    "Attaching": {
        "attach() takes an nn.Module": (
            "The first argument is the model itself, not its name, its state dict or a "
            "pipeline: pass `pipeline.transformer`."
        ),
        "was made under torch.inference_mode()": (
            "Weights that count no writes have to become ordinary tensors; make the model outside "
            "`torch.inference_mode()`, or attach before anything in C++ holds its weights."
        ),
        "was written while its weights were read": (
            "Another program saves to the file: wait until it has ended, and attach again."
        ),
        "disk=True next to share='node'": (
            "Ranks that share weights share what is written to them, and a file is never written: "
            "have the weights in memory that is shared, or let each rank read its own."
        ),
        "is neither True nor False": "`disk` is a switch; `ram_budget` says how much.",
        "ram_budget='offloaded' is for weights that stay": (
            "With `disk=True` what has no room stays in its file, and needs no place on the device."
        ),
        "disk=True is for frozen weights": (
            "Weights and optimizer states that change would be written at every step, and wear a "
            "disk out: train adapters of a frozen model, or give `ram_budget` room for what trains."
        ),
        "disk=True leaves weights in the files": (
            "Give the files: `attach(..., weights=path, disk=True)`; the model is made inside "
            "`oracle_offload.empty_weights()`."
        ),
        "disk=True needs a system that tells": (
            "On Windows have the weights in memory (`ram_budget`), or use WSL2."
        ),
        "disk=True: no weight can stay": (
            "What stays is read as it is: the file needs the model's names, shapes and dtypes. "
            "`oracle_offload.save_weights` writes such a file once."
        ),
        "is on a network mount": (
            "Each step would wait for another machine, and a change there is not seen in time: "
            "copy the files to a local disk."
        ),
        "was written since its weights were attached": (
            "Weights that stay in their file are read as long as the model is attached. A new "
            "version goes to another file, which may then be renamed to this one's name."
        ),
        "ended before its bytes had come": (
            "A read returned less than the file has: look at the system's log for the disk."
        ),
        "was replaced or written while it was opened": (
            "Another program saves to the file: wait until it has ended, and attach again."
        ),
        "cannot be mapped": "The file system maps no files privately: copy it to another.",
        "memory that shows a file cannot be locked": (
            "An engine knows such memory by `oo_engine_lock` of 0 bytes."
        ),
        "the next step reads again": (
            "The system's reason follows; where it lasts, the disk or its cable is failing."
        ),
        "more say something": (
            "A file that is this small is read before a disk has shown its rate: name a larger one."
        ),
        "ways need more": "Each way of reading takes a part of the file: name a larger one.",
        "disk=True with quantize=": (
            "Weights on disk are read as the file has them. Quantise once, save that, and plan for "
            "the quantised file."
        ),
        "is not a number in [0, 1]": "`offload_percent` is a share: 0.9 offloads 90%.",
        "is outside [0, 1]": "`offload_percent` is a share: 0.9 offloads 90%.",
        "set_budget() needs a budget=": (
            'Say what changes: `manager.set_budget(vram_budget="20GiB")`, or an `offload_percent`.'
        ),
        "which set_budget does not change": (
            "`ram_budget`, `lock` and `compress` say where the masters are, which attach decides."
        ),
        "and what was learned of blocks": (
            "An arena needs its floor, which grows to the largest checkpointed block that was seen."
        ),
        "is no oracle_offload.Budget": (
            "`budget` takes an `oracle_offload.Budget(...)`; a size alone is `vram_budget`."
        ),
        "next to budget=: give each": (
            "A budget says all of it: `Budget(vram_budget=..., lock=...)`. Give none outside of it."
        ),
        "and none of the rates": (
            "`plan` takes measured rates by name: `link_gbps`, `memory_gbps`, `tflops`, `launch_s`."
        ),
        "compress=… is none of": (
            '`compress` is `None`, `"lossless"` or `"auto"`; [lossless.md](lossless.md) says what '
            "they do."
        ),
        "is neither 'auto' nor 'never'": (
            "`lock` says how much of the weights is page-locked: what the system allows, none, or "
            "no more than a size."
        ),
        "but the smallest unit needs": (
            "`ram_budget` bounds the host memory for weights; what has no room stays on the "
            "device. With room for none of them there is nothing to stream."
        ),
        "is not a path": "`order_file` is the name of a file or a folder, or None.",
        "the system does not tell how much memory is free": (
            '`/proc/meminfo` is hidden here, so `"auto"` has nothing to go by.'
        ),
        "is attached already; detach it first (": (
            "Attach a model once; `MemoryManager.detach(model)` ends it. To change a budget, "
            "`manager.set_budget(...)`."
        ),
        "then attach the whole model once": (
            "A part of the model was attached before. Detach that part, then attach the whole."
        ),
        "has hooks that move its weights": (
            "accelerate's offloading or diffusers' group offloading is on this model and does what "
            "`attach` does. The message names the call that takes it off: use one of them."
        ),
        "has no layer to manage": (
            "Nothing in it computes with exactly `nn.Linear.forward` or `nn.Conv2d.forward` "
            "and plain floating-point weights, or all of it is in `ignore_modules`. Quantised"
            " weights are not managed."
        ),
        "on the meta device, without values": "The weights were never loaded: load, then attach.",
        "the model has no module or parameter named": (
            "The name is not one of `dict(model.named_modules())`, nor of its parameters; a wrapper"
            " (DDP, peft) puts its own name before those inside."
        ),
        "adapts layers of torch's own class alone": (
            "peft's GLoRA asks for `nn.Linear` itself: put it on, then attach."
        ),
        "is neither a module, a parameter nor": (
            "`ignore_modules` takes names, modules and parameters."
        ),
        "need …; raise the budget to that": (
            "The arena must hold the unit that computes and the one that comes next. Raise "
            "the budget, or leave the largest layer resident with `ignore_modules`."
        ),
        "they need an arena of": (
            "In a warning: layers were replaced after attach by larger ones, and stay on the "
            "device. Detach, and attach again with a larger `vram_budget`."
        ),
    },
    "Weights from files": {
        "has no safetensors file (": (
            "The folder is not that of one model: name the subfolder, or the file itself."
        ),
        "snapshots and none is 'main'": (
            "A model's folder in the hub's cache without `refs/main`: name one of its `snapshots`."
        ),
        "has no snapshot '": (
            "The folder of the hub's cache is incomplete: download it again, or name one of its "
            "`snapshots`."
        ),
        "is an index that names no tensors": "The index of the shards is empty: download it again.",
        "which is no file next to it": (
            "An index may name files of its own folder alone; another path could be anything."
        ),
        "there is no such file or folder": "`weights` is a path on this machine, no name of a hub.",
        "is no folder; nothing is downloaded": "Give the path; `hf download` fetches a model.",
        "other formats can run code when they are read": (
            "Convert the weights once, with `safetensors.torch.save_file`."
        ),
        "has several: …": "`weights` takes the path of one of them.",
        "it has … bytes": (
            "An index or a config is a small file; the message that this becomes has its name."
        ),
        "it has no 'weight_map'": (
            "An index is `*.safetensors.index.json`, as the libraries write it next to shards."
        ),
        "cannot be read: …": "The system's own words follow.",
        "is a damaged index": "The index of the shards is no JSON, or not in this form.",
        "while it was read: it was changed or cut off": (
            "Another program writes the file. Nothing was kept: attach again when it is whole."
        ),
        "but it is not.": "Index and shards are not of one checkpoint: download all of them again.",
        "is in two of its files": "The shards are of several checkpoints: download them again.",
        "which is too short for a safetensors file": "A download or a copy did not end.",
        "promise a header of": (
            "The file is something else under this name (a Git LFS pointer, a web page), or a part "
            "of a safetensors file."
        ),
        "it names no tensors": "A damaged or forged file; nothing of it is used.",
        "it has a name twice": "As above; the message that this becomes has the file's name.",
        "has no proper shape or place": "A damaged or forged file; nothing of it is used.",
        "has a damaged header: '…' has shape": "A damaged or forged file; nothing of it is used.",
        "which is not known here": "The file is of a newer form of safetensors, or damaged.",
        "but its place has": "A damaged or forged file; nothing of it is used.",
        "its tensors end at byte": "A download or a copy did not end, or two files were mixed up.",
        "which is no JSON": "A damaged or forged file; nothing of it is used.",
        "overlap others or leave a gap": "A damaged or forged file; nothing of it is used.",
        "does not fit": (
            "Names of the file and of the model's `state_dict` differ: another model, another "
            "version of the library, or a prefix. Nothing is guessed."
        ),
        "and no file has what": (
            "Under `torch.device('meta')` buffers and tables lose their values. Inside "
            "`oracle_offload.empty_weights()` the class computes them."
        ),
        "because something else holds it": (
            "A weak reference or a hook keeps a Parameter. Attach before whatever does that."
        ),
        "but the model's has": "The file is of a model of another size.",
        "quantise what is there already": (
            "Without `weights` the model has its values: call the library's function on it, then "
            "attach."
        ),
        "which a safetensors file cannot hold": (
            "`save_weights` writes plain tensors: what torchao or quanto made of them is theirs."
        ),
        "without values to save": "The model was never loaded.",
        "which cannot be done while they are read": (
            "A rule of transformers that is more than a question of places. The message says how "
            "the file is converted once."
        ),
        "is no model's class of transformers": "`from_pretrained` knows these two libraries.",
        "its library makes other layers for it": (
            "The configuration asks for quantisation, by which the library exchanges layers."
        ),
        "not rows of one tensor": "Becomes the message above, with the names.",
        "only floating-point weights are converted": (
            "The file's weights are quantised, the model's are not, or the other way round."
        ),
    },
    "Planning": {
        "is not known; there are …, and the sizes": (
            "`card` names one of the presets of docs/plan.md; of another give `vram` and the rates."
        ),
        "a rate is a number above zero": (
            "`link_gbps`, `memory_gbps` and `tflops` are rates, `launch_s` seconds."
        ),
        "alone fill the host": (
            "A full training keeps gradients and optimizer state as well as weights: more `ram`, a "
            'lighter `optimizer`, or `train="lora"`.'
        ),
        "its state is not known": "Name one whose state has the same shape.",
        "in backward the weights of a full training are stepped": (
            'Without `train="full"`, or with `master_dtype`, leave `during_backward` out.'
        ),
        "weights are stepped once for each backward": (
            "Several micro-batches have several backwards: take one, or step after backward."
        ),
        "is neither 'lora' nor 'full'": 'QLoRA is `train="lora"` with `quantize="nf4"`.',
        "bytes of addresses for a replay": (
            "A planned step is replayed with an arena of addresses alone, which take no memory; "
            "only a 32-bit process, or a limit of the system on addresses, runs out of them."
        ),
        "=… is not known; there are …": "The message lists what is.",
        "is outside [0, 1)": "`margin` is a share of the card: 0.08 leaves 8% to CUDA.",
        "is not a whole number above zero": "`rank`, `batch` and `micro_batches` count.",
        "is no file, no folder, no model that is known by name": (
            "Check the path or the name; a number of parameters has K, M, B or T behind it."
        ),
        "takes the name of a repository": "`--fetch` asks the hub for a config by that name.",
        "the hub has not given the config of": (
            "Nothing answers, there is no such repository, or it wants to know who you are: "
            "`hf auth login`."
        ),
        "--fetch needs huggingface_hub": "`pip install huggingface_hub`.",
        "has none of … on the hub": "Give the class: `plan(Class, config=...)`.",
        "no result of the model depends on what is trained": (
            "The plan says so under what it assumed; `targets` name layers that forward uses."
        ),
        "is not NAME=SIZExSIZE": "For example `hidden_states=4096x64,timestep=:int64`.",
        "the replay of a step failed": (
            "The message ends in the last words of the process that replays; `measure=False` plans "
            "without it."
        ),
        "is neither a safetensors file, an index": "Give the folder that it is in.",
        "plan() takes an nn.Module": (
            "Give the model, its class with `config=`, a path, a name, or a number of parameters."
        ),
        "a shape is like (4096, 64)": "`sample=` maps the arguments of forward to shapes.",
        "there is nothing to plan": "Give the part of the pipeline that has weights.",
        "a number of parameters is above zero": 'It is a number, like `12e9` or `"12B"`.',
        "give the class: plan(Class, config=...)": (
            "No library that is installed has the config's class; import it, and give it."
        ),
        "nothing is downloaded by default": "`--fetch` fetches the config, and no weights.",
        "is of a model that is quantised already": (
            "What its layers keep is known to its library alone. Give the folder of the model "
            "before it was quantised, and the form with `quantize=`."
        ),
        "is no name of a tensor in any model": "A damaged or forged file.",
        "which torch … does not have": "A newer torch has that dtype.",
        "named by the index, but not there": "Fetch the missing files, or give the config alone.",
        "holds no JSON object": "The file is cut off, or no config.",
        "cannot be made of this config": (
            "The class refused it, in the words behind the colon: another class, or a config of "
            "another release of its library."
        ),
        "is a config of …, which": "Install that library, or give the class.",
        "holds neither config.json nor safetensors files": (
            "Give the folder that they are in, of a pipeline the folder of the transformer."
        ),
        "quantised weights are not trained": "Train a LoRA on top of them.",
        "disk=True with train='full'": (
            "Weights and optimizer states that change would be written at every step, and wear a "
            "disk out: train adapters of a frozen model, or give the host room for what trains."
        ),
        "disk=True with quantize=": (
            "A weight stays in its file as the file has it. Quantised ones take less memory: plan "
            "them without the disk."
        ),
        "or more say something": "Name a larger file: a few reads say nothing of a disk.",
        "ways need more": "Try fewer ways to read, shorter reads, or a larger file.",
        "the layers that can have a LoRA are called": (
            "`targets` are names of layers or their ends, as in peft's `target_modules`."
        ),
    },
    "Activations that leave": {
        "a transform of torch.func saves no tensors by hooks": (
            "`torch.func.grad` and the like keep no saved tensors that could be packed. See "
            "[activations](activations.md)."
        ),
        "takes saved tensors": (
            "Two that move the same tensors would each wait for the other's copies. Which one is "
            "there already is named."
        ),
    },
    "Optimizers that step on the device": {
        "is not a torch.optim.Optimizer": "`stream_optimizer` takes the optimizer itself.",
        "trains no managed Parameter": (
            "Attach the model first, then make the optimizer; or nothing of the model is managed, "
            "and the optimizer steps on the device as it is."
        ),
        "is none of 'device', 'host', 'auto'": "`step` says where managed Parameters are stepped.",
        "with during_backward=True Parameters are stepped": (
            "In backward a Parameter is stepped on the device, and its gradient never leaves it. A "
            "step on the host needs gradients there."
        ),
        "trains models on several devices": "Make one optimizer for the model on each device.",
        "somebody has put another step into this object": (
            "A wrapper (a library's, or yours) has replaced `optimizer.step`: call "
            "`stream_optimizer` before it does."
        ),
        "streamed already, with during_backward": "Whether it steps in backward is said once.",
        "another optimizer steps a Parameter of shape": (
            "Two optimizers with `during_backward=True` have the same Parameter: give it to one."
        ),
        "steps in backward: ": (
            "What the error names needs all gradients at once, or twice. "
            "[All weights train](full-fine-tuning.md) says what goes with `during_backward=True`."
        ),
        "accumulate was called while an optimizer steps in backward": (
            "Nothing was computed yet. A weight is stepped once for each backward."
        ),
        "the latest backward was broken off before anything was stepped": (
            "Nothing has changed, and nothing is there to step: call backward again."
        ),
        "steps these Parameters in backward": (
            "Gradients are clipped when all of them are known; by then these are stepped. Clip "
            "with an optimizer that is streamed without `during_backward=True`."
        ),
        "its states are paged": "Take the class of bitsandbytes without `Paged` in its name.",
        "it steps small Parameters otherwise one by one": (
            "The optimizer computes something of all its Parameters, or counts its calls. It "
            "trains as before, on the host."
        ),
        "its step draws random numbers": (
            "Rounding at random, for one. It trains as before, on the host; or leave the option "
            "out that draws."
        ),
        "which is lost between batches": (
            "The optimizer keeps something of a step in an attribute (a counter, a dict of "
            "momenta) or in the options of a group, and not in its `state`. It trains as before, "
            "on the host."
        ),
        "Parameters or another optimizer, which": (
            "A wrapper of optimizers, or one that gathers its Parameters. Stream the optimizer "
            "that it wraps, where it wraps one, before it does."
        ),
        "do not stay on the device": "Make the optimizer without this option.",
        "stepping small Parameters": (
            "Its step needs a closure, or something else that a step does not get here. It trains "
            "as before, on the host."
        ),
        "has a sparse gradient": "Make the `nn.Embedding` with `sparse=False`.",
        "it takes no further step": (
            "A fault lasted while a step was completed that had been interrupted. Some weights are "
            "stepped and others are not: load the last checkpoint."
        ),
    },
    "Sizes": {
        "is not a finite number of bytes": "A computed size came out as infinite or no number.",
        "is not a size; use bytes": 'Write bytes, `"8GiB"`, `"8GB"` or a share such as 0.5.',
        "is not a size; write it like": 'Write bytes, `"8GiB"`, `"8GB"` or a share such as 0.5.',
        "a fraction needs a device": (
            "A share is of the memory of a device; here there is none. Write bytes."
        ),
        "must be above zero": (
            "No size is zero or negative. To offload all, use `offload_percent=1.0`."
        ),
    },
    "Device and driver": {
        "the driver cannot read the kernels of this build": (
            "They decode compressed weights (`compress=`), and were compiled by a newer CUDA than "
            "the driver's: in binary for some cards, and as PTX of compute capability 8.0 for all "
            "others; an older driver may refuse either. Nothing else that trains needs them."
        ),
        "is not a device; use 'cuda'": "Write a device as torch does.",
        "only 'cuda' and 'cpu'": (
            'Weights are streamed by the CUDA driver; other accelerators have none. `"cpu"` '
            "is the simulated device."
        ),
        "but there is one simulated device": "It has no number; several cards are CUDA's.",
        "but torch sees no CUDA device": (
            "torch was built without CUDA, or the driver does not answer: `oracle-offload "
            "doctor` says which."
        ),
        "CUDA device(s)": ("The index is too high; `CUDA_VISIBLE_DEVICES` renumbers cards from 0."),
        "device \u2026 was asked for": (
            "The index is too high; `CUDA_VISIBLE_DEVICES` renumbers cards from 0."
        ),
        "cannot be loaded": (
            "No driver is installed, the container was not given the card, or "
            "`ORACLE_OFFLOAD_DRIVER` names a file that is no library."
        ),
        "no CUDA driver": (
            "No driver is installed, the container was not given the card, or "
            "`ORACLE_OFFLOAD_DRIVER` names a file that is no library."
        ),
        "is the CUDA toolkit's stub": (
            "`LD_LIBRARY_PATH` leads to the library for linking before it leads to the driver."
        ),
        "the NVIDIA driver sees no CUDA device": (
            "No card, a container without one, or `CUDA_VISIBLE_DEVICES` hides them all."
        ),
        "update the NVIDIA driver": (
            "The driver is older than what the engine calls; `oracle-offload doctor` names "
            "its version."
        ),
        "\u2026: \u2026 (\u2026): \u2026": (
            "A call of the driver failed: its name, the result with its number, and what CUDA"
            " says of it. What failed once can be tried again."
        ),
        "the GPU context was lost": (
            "An earlier error (an illegal address, a card that fell off the bus) killed the "
            "context; it names the call that saw it. Weights on the host are whole: save "
            "them, then start the process again. One such error that resident models have as "
            "well: on Hopper cards torch 2.11 takes cuDNN 9.19 for attention, whose backward "
            "read an illegal address for 24 heads of 128 and 4,608 tokens in bf16 (seen on an "
            "H200). `torch.backends.cuda.enable_cudnn_sdp(False)` leaves it out."
        ),
        "driver objects could not be given back": (
            "Logged at detach, not raised there: the driver failed while memory was given "
            "back. It is tried again at the next attach or detach."
        ),
        "is no simulated device": "See [environment variables](environment.md).",
        "is no schedule": "See [environment variables](environment.md).",
        "unknown preset": "A preset is one of `simulator.PRESETS`.",
        "a device's name takes": "Shorten the name of the simulated device.",
        "this build has no kernels": (
            "They decode compressed weights (`compress=`); nothing else that trains needs them. "
            "Build where nvcc is, or leave `compress=` out."
        ),
        "the engine is not built in": (
            "Python finds the folder of a clone before the installed package when it is started "
            "there."
        ),
        "is missing though it was built": "The installation is damaged: install again.",
        "which is not installed; install the build": (
            "Training needs torch, which pip does not bring: install the build that fits the card."
        ),
    },
    "Memory": {
        "has no place for a unit of": (
            "All of the arena was being computed with, or what is free is in pieces that "
            "are too small. A thread that computes with nothing itself has waited for what others "
            "compute with, and for what their autograd graphs keep. Raise `vram_budget` or lower "
            "`offload_percent`."
        ),
        "memory left for weights": (
            "The weights do not fit the host's memory, or the limit of the container: "
            "`oracle-offload doctor` shows both."
        ),
        "no memory for": "The host's memory ran out.",
        "do not get as small as parts of them did": (
            "The compressed size of a weight is estimated from parts of it, before all of it is "
            "read: between these parts it has less of a pattern."
        ),
        "has room for the weights only if they are": (
            "The file of a compressed weight is in the cache, which must be writable."
        ),
    },
    "Training": {
        "has been modified by an inplace": (
            "Something wrote the weight after forward and before backward: an optimizer step,"
            " EMA, a merge, `load_state_dict`. Do that after backward."
        ),
        "was written while another call computes with it": (
            "Its codes are on the device, and must stay while code computes with them. A "
            "graph that awaits its backward does, and so does code that keeps the weight."
        ),
        "was replaced by another thread while its backward began": (
            "One thread swaps weights (an EMA, a load) while another trains. Swap between steps."
        ),
        "was detached between forward and backward": "Run backward, then detach.",
        "in a tensor on": (
            "torch's fused Adam copies a tensor `lr` to the host without waiting for it, Adam's "
            "loop a tensor `betas`. Managed weights that are trained are on the host: give numbers."
        ),
        "double backward through": (
            "`create_graph=True` (gradient penalties, MAML) needs the weights of these layers"
            " a second time. Leave those layers resident."
        ),
        "cannot trace an attached model": (
            "These tracers write down what one call computed with; a managed layer has its weights "
            "for that call alone. Detach, then trace. `torch.compile` works: [compile](compile.md)."
        ),
        "compiled code computes with a managed layer": (
            "The model was detached while compiled code ran, in another thread. Call it again."
        ),
        "which it has read: the write would be lost": (
            "In compiled code a weight that is read is a copy. Write outside of it, in a function "
            "under `torch.compiler.disable`, or leave that layer resident."
        ),
        "inside a compiled forward": (
            "A parametrisation or `functional_call` replaces a Parameter. Leave that "
            "layer resident, or do not compile it."
        ),
        "or call torch.compiler.reset() after such": (
            "The module's code returns something else than when it was compiled. Leave that module "
            "resident, do not compile it, or have it compiled again."
        ),
        "which makes that call once more": (
            "Set it between steps, after backward and before the next forward."
        ),
        "as compiled code was": (
            "The library's code, run over an input that holds nothing, has returned another dtype "
            "or size. Leave that layer resident, or do not compile it."
        ),
        "is no Parameter of it; in compiled": (
            "The module came to a trainable tensor after it was compiled. Call "
            "`torch.compiler.reset()`, or leave the module resident."
        ),
        "are not what its compiled forward": (
            "Re-point weights between steps, after backward and before the next forward."
        ),
        "is not what its compiled forward computed": (
            "Re-point weights between steps, and compute or write them outside the compiled code."
        ),
        "torch.func transforms over": (
            "`vmap`, `grad`, `jvp` and the like call the layer with tensors that are none. "
            "Leave it resident, or detach."
        ),
        "max_norm of managed layer": (
            "An embedding with `max_norm` writes its table as it looks up rows. Set it before "
            "attach, or name the layer in `ignore_modules`."
        ),
        "forward-mode differentiation": "Dual numbers are not supported. Leave the layer resident.",
        "a forked child": (
            "A DataLoader worker or another fork used the model. Use it in the parent alone, "
            "or start workers with `spawn`; see [DataLoader workers]"
            "(memory.md#what-a-dataloader-worker-may-not-do)."
        ),
        "is a fork of the one that trains": (
            "A DataLoader worker or another fork used the model. Use it in the parent alone; "
            "see [DataLoader workers](memory.md#what-a-dataloader-worker-may-not-do)."
        ),
        "the host master of": (
            "Code computes with `layer.weight` and does not call the layer. Name the layer in"
            " `ignore_modules`; it then stays resident."
        ),
        "captured into a CUDA graph": (
            "Slots move, and a graph replays addresses. Do not capture "
            '(`mode="reduce-overhead"` does), or leave the layers resident.'
        ),
        "were replaced while another call": (
            "Two threads: one replaces weights while the other computes with them. Replace "
            "them between steps."
        ),
        "were rewritten while another call": (
            "Two threads: one writes weights while the other computes with them. Write "
            "between steps."
        ),
    },
    "Lending to a module's forward": {
        "was kept since it was read, and written meanwhile": (
            "Code kept `layer.weight` from an earlier forward, on the module say, and an optimizer "
            "or a load has written the weight since. Read `layer.weight` where it is used."
        ),
        "two weights that share memory there": (
            "On a resident model `a.weight.data = b.weight.data` ties the two. Tie them before "
            "`attach`, or copy."
        ),
        "of a managed layer cannot be a tensor like that": (
            "Code gave a weight new `.data` in a forward that cannot be on the host for it (with "
            "gaps, on another device). Give it outside of the forward."
        ),
        "and autograd records it": (
            "The module changes its own weight in forward where autograd records: then it is no "
            "Parameter any more. Write under `torch.no_grad()`, or leave it resident."
        ),
        "has been inside the forward of": (
            "Two threads compute with one module, and one of them does not come out. Give each "
            "its own copy, or leave the module resident."
        ),
        "are still held on the device": (
            "Finish or drop the graph that awaits backward, and whatever keeps a weight, then "
            "detach."
        ),
    },
    "Taking down": {
        "is not attached; detach takes": (
            "Detach the model that was attached, not a part of it or a wrapper."
        ),
        "needs the attached module": (
            "`manager.detach()` needs no argument; `MemoryManager.detach(model)` does."
        ),
        "has been deleted": "The manager outlived its model; its memory is given back already.",
        "is being computed with; detach": (
            "Another thread is inside forward or backward: wait for it, then detach."
        ),
        "manages another model": (
            "Call `refresh` of the manager that `attach` returned for this model."
        ),
        "detach them first": "Models are still attached to the engine that is being closed.",
    },
    "AI-Toolkit": {
        "memory manager has models attached already": (
            "`install()` exchanges AI-Toolkit's package for this process: call it first."
        ),
        "manager_modules.py next to it is": (
            "The two files in `toolkit/memory_management` belong together; see "
            "[AI-Toolkit](ai-toolkit.md)."
        ),
        "give the path of an AI-Toolkit checkout": "The path names another folder.",
        "with the original is gone": (
            "The copy that `install` kept was removed; git has the original too."
        ),
        "is of a version that is not known": (
            "AI-Toolkit's file was changed, by you or by a version newer than this release. "
            "Nothing is replaced that cannot be judged."
        ),
    },
    "Allocator settings": {
        "configure_allocator:": (
            "PyTorch's allocator reads its settings once; see [the "
            "doctor](doctor.md#allocator-settings)."
        ),
    },
    "The timeline": {
        "a timeline cannot be recorded": "The driver is too old for it.",
        "a timeline is being recorded already": "One at a time on a device: end the first.",
        "no timeline is being recorded": "Begin one first.",
        "a journal is being kept already": "One at a time for each engine: end the recording.",
        "no journal is being kept": "Its recording has ended, or has failed.",
        "a journal of 0 entries": "Keep at least one.",
        "no memory for a journal": "Keep fewer: `record(max_events=...)`.",
    },
    "Recordings": {
        "max_events=": "How many events are kept of each device.",
        "timed_every=": "How many whole steps come between two that are timed; 0 times none.",
        "a recording is under way already": "One at a time in a process.",
        "begins with": "The file is no recording, or one of another version: write it again, with "
        "this one, as `.jsonl`.",
        "no part of a recording": "The line was changed, or is another file's; without it the rest "
        "can be read.",
        " is damaged: … without": "The line was changed; without it the rest can be read.",
        "not JSON": "The line is broken: a disk that was full, or a process that was killed.",
        "use 'html', 'chrome'": "Name a format, or give the file one of these suffixes.",
    },
    "Keeping a training alive": {
        "is not a whole number above zero": "Sizes, steps and floors are counted from 1.",
        "cannot be split; give tensors": (
            "`AdaptiveBatch` divides the first dimension of every tensor of the batch; all have to "
            "have the same one. Hand over what is no sample in another way, such as a closure."
        ),
        "the batch weighs": "`weight_of` counted nothing: every label is masked.",
        "is not above zero": "Ask for a number of bytes above zero.",
        "use a factor in (0, 1], minus >= 0": "A law of shrinking makes sizes smaller, not larger.",
        "makes nothing smaller": "A law of shrinking needs a factor below 1, or `minus`.",
        "is outside [minimum": "The first size must be between the smallest and the largest.",
        "is not in [0, 1)": "Margins and hysteresis are shares of a memory: 0.05 is 5%.",
        "nothing refuses memory there": (
            "Only a card refuses memory. A host gives it until the system ends the process, so the "
            "search needs a limit to stop at."
        ),
        "is not in (0, 1]": "A cap is a share of the card's memory: 0.75 is 75%.",
        "has no cap on its memory": (
            "There is no CUDA card by that name here. A host's memory is capped by a control group."
        ),
        "has no state_dict and load_state_dict": (
            "Name parts that have both; keep numbers of your own in an object that has."
        ),
        "holds no checkpoint": "The file is none of torch's, or was damaged after it was written.",
        "is no checkpoint of": "Something else has this name, or another version wrote it.",
        "is of another training": (
            "The model, what of it is trained, or the parts differ from those that were saved. "
            "Make them the same way, or start with another path."
        ),
        "which cannot be loaded without running code": (
            "The message names the place. Save numbers and tensors, and make the object of them in "
            "`load_state_dict`."
        ),
        "to warn at is above": "A warning comes before what is critical: exchange the two.",
        "has a __deepcopy__ already": (
            "The class, or a counter before this one, copies the model itself."
        ),
        "training has to resume below the limit": (
            "`resume_c` must be below `limit_c`, and a pause lasts some time at most."
        ),
        "is not a number of steps; use 1 or more": "Give a whole number of steps above zero.",
        "has no trainable parameter to watch": (
            "Nothing has `requires_grad` yet: add the adapter first, then make the alarm."
        ),
        "a proof needs a managed model": "Attach the model first; see `attach`.",
        "the model has no module of this name": (
            "The name is not one of `dict(model.named_modules())`."
        ),
        "is managed; name a block that has one": (
            "What is in that block stays on the device, so there is nothing to prove."
        ),
        "was not called in the step that was to be proved": (
            "The forward inside the `with` block took another way. Name a block that it calls."
        ),
        "returned no tensor to compare": (
            "The block returned an object whose tensors cannot be found. Name one that returns a "
            "tensor, or a tuple or dictionary of them."
        ),
        "does not compute the resident block's bits": (
            "What kernels do not repeat is not compared, so this is a bug of this library, or a "
            "block that counts its calls: report it with the block's class."
        ),
        "give those that it was taken of": (
            "The generators given now are not those that the state was taken of."
        ),
        "resume where as many are visible": (
            "Each card has a generator of its own; see `CUDA_VISIBLE_DEVICES`."
        ),
    },
    "Numbers": {
        "is no number": "`Meter.read` and `MetricsFile.log` take numbers, and None for unknown.",
        "report does not show this file": (
            "`report` shows metrics files, recordings as `.jsonl`, memory snapshots, and logs in "
            "which memory ran out. A page that it wrote is for a browser."
        ),
        "a memory snapshot holds plain data alone": (
            "The file would run code, or was written by something else than torch: do not load it "
            "with `pickle` either."
        ),
        "objects outside the file": "The file was not written by torch's memory snapshot.",
        "no segments": "Name what `torch.cuda.memory._dump_snapshot` or a recording wrote.",
        "is not read": "Have fewer events noted: `record(max_events=...)`.",
        "not in torch's format": (
            "The file is broken, or of a version of torch whose format is not known here."
        ),
        "text was expected": "The file was written by something else than torch's memory snapshot.",
        "the memory snapshot has more than": "Have fewer events noted: `record(max_events=...)`.",
        "no memory snapshot that can be read": (
            "The file is broken: a disk that was full, or a process that was killed."
        ),
        "is no heartbeat of this version": "It was written by another version of the package.",
        "which is not installed here": "Install the library, or use another sink or callback.",
        "not a number:": "Of a tensor of several elements give its mean, or one of them.",
    },
    "The demo": {
        "must be cuda, cuda:N or cpu": "The demo runs on a GPU, or on the simulated device.",
        "offload-percent=… is a share": "0.9 offloads 90%.",
        "seed=… must be": "torch takes a seed of 32 bits everywhere.",
        "svg=… is a folder": "Name the file that the timeline is written to.",
        "must be a multiple of 64": "The demo's transformer has heads of 64.",
        "steps=\u2026 must be": "Ask for three steps or more.",
    },
    "Micro-batches": {
        "did not call backward; return the loss": (
            "`accumulate` needs one loss of each micro-batch: returned, or handed over by "
            "`loss.backward()`."
        ),
        "call it where a step of training begins": (
            "`accumulate` runs forward and backward itself; it is no part of either."
        ),
        "the step called backward twice": (
            "All micro-batches have one backward together, so each has one loss."
        ),
        "a backward over all micro-batches cannot take": (
            "What one loss asks of backward, all would get. Without `accumulate`, in the plain "
            "loop, it can be asked for."
        ),
        "accumulate is already under way in this process": (
            "While it runs it intercepts torch's calls of backward. Call it from one thread, and "
            "not from a step."
        ),
        "the steps call backward in different contexts": (
            "End the `with` block before `loss.backward()`, as PyTorch advises for autocast."
        ),
        "leaves there reaches the next in another order. If each sets it": (
            "An attribute of a module, or a global that the model's code reads, is written by the "
            "steps, and whether the next micro-batch reads what the one before has left cannot be "
            "seen. Where each sets it first, `own=[...]` gives each its own."
        ),
        "computes the batches of a step in a loop of its own": (
            "The setting lets AI-Toolkit's SDTrainer, and trainers that inherit its loop, fetch "
            "each block once for all batches of `gradient_accumulation`."
        ),
        "is set for a training with": (
            "Its batches could not be computed side by side: see the page on AI-Toolkit."
        ),
        "random numbers were drawn in backward": (
            "`torch.utils.checkpoint` keeps the generator's state unless it gets "
            "`preserve_rng_state=False`."
        ),
        "runs micro-batches in greenlets": (
            "greenlet is an optional dependency: it lets a forward stop between two blocks."
        ),
        "the forward writes to …: what": (
            "State that one micro-batch leaves to the next (running statistics, power iterations) "
            "depends on the order of their forwards."
        ),
        "its statistics depend on the order of the micro-batches": (
            "Freeze its statistics with `eval()`, use a norm without them, or leave interleaving."
        ),
        "its gradients would be summed in another order": (
            "A weight that is tied, or used by several calls of the model in one step; or, under "
            "autocast, a float32 weight whose cast several blocks share. Sums of floating point "
            "numbers depend on their order."
        ),
        "the steps share a tensor that": (
            "A tensor that needs gradients was computed once, before `accumulate`, and each step "
            "uses it: a cast of a weight, say. Backward would go through it once, with the sum."
        ),
        "accumulate_in was given a Trainer of": (
            "DistributedDataParallel shares gradients in the backward of a step's last "
            "micro-batch, and here the first one has the backward of all."
        ),
        "lets micro-batches take turns from torch 2.8 on": (
            "Earlier versions do not name the saved-tensor hooks that are active."
        ),
        "has a gradient before accumulate begins": (
            "Gradients of an earlier step, or of another `accumulate` in the same one: give all "
            "micro-batches of a step to one call."
        ),
        "has a gradient hook, which would see the sum": (
            "`Tensor.register_hook` on a weight; hooks on the accumulated gradient "
            "(`register_post_accumulate_grad_hook`) are called once, with the sum."
        ),
    },
    "Several GPUs": {
        "share=… is neither None nor": '`share` is None or "node": docs/several-gpus.md.',
        "share='node' needs a process group": (
            "Ranks find one another by torch's process group: it has to be there before `attach`."
        ),
        "share='node' shares frozen weights": (
            "Weights that are trained are each rank's own, so there would be nothing to share."
        ),
        "share='node' places ranks by": (
            "torchrun sets all four; `mp.spawn` and some clusters set none or others."
        ),
        "the system makes no shared memory": (
            "`memfd_create` failed: a sandbox forbids it, say. On Windows not so much is left "
            "of memory and page file; macOS has no such memory."
        ),
        "did not come to attach within": (
            "A rank failed before, is slower than the time-out of `init_process_group`, or does "
            "not call `attach`: look at its own output."
        ),
        "cannot reach rank 0 of this machine": (
            "The settings of ranks of two machines or containers say that they are of one."
        ),
        "all of them have to be of one job, with as many GPUs": (
            "`LOCAL_WORLD_SIZE` differs: all agents start with the same `--nproc-per-node`."
        ),
        "did not answer within": (
            "A rank is at something else, a collective that others do not make, say."
        ),
        "is gone: it was killed": "Its own output, or `dmesg`, has the reason.",
        "the ranks of this machine are at different calls": (
            "`attach`, `refresh` and `writing` are made by all ranks alike, in one order."
        ),
        "was refused the descriptor": "`ulimit -n` is used up, or a sandbox forbids it.",
        "than rank 0 (": "The message has the first thing in which two ranks differ.",
        "has other values of": (
            "Each rank made or loaded its weights by itself: from other files, or by chance."
        ),
        "which another has written: all have": (
            "Codes are written by one rank and read by the others, from one folder."
        ),
        "a forked child takes no part": "A DataLoader's worker has no part in what ranks do.",
        "that ranks share were about to be written": (
            "An optimizer without gradients (MeZO), or a merge, outside `manager.writing()`."
        ),
        "has weights that ranks share, which are written": (
            "Load what is trained alone, or all of it in `manager.writing()`."
        ),
        "which load_state_dict cannot write once for all": (
            "The first rank would write, or replace, what the others read: without `assign=True` "
            "plain weights are written in place; quantised ones are loaded before attach."
        ),
        "adapters cannot be merged into quantised weights that ranks share": (
            "A merge replaces quantised weights, on each rank by others: detach, merge, and attach."
        ),
        "is not memory as rank 0 makes it": (
            "The descriptor that came is none of rank 0's memory: something between the ranks, a "
            "sandbox say, has put another in its place. Attach without `share`."
        ),
        "writing() and refresh() are in a block of writing()": (
            "The inner call would end the outer one's right to write: leave the block, which "
            "refreshes by itself."
        ),
        "some ranks have merged adapters": (
            "Call the merge on all ranks in `manager.writing()`, not where `mine` is true alone; "
            "start again from a checkpoint."
        ),
        "the weights that ranks share are at generation": (
            "Another rank has written the weights while this one took no part."
        ),
        "FSDP shards Parameters": "FSDP and `attach` exclude each other.",
        "the system does not map": "Shared memory could not be mapped.",
        "the system does not let memory be": "Memory could not be made read-only, or writable.",
    },
    "Recipes": {
        "batches add up to": (
            "The function that weighs a batch returns how much there is to learn from it, tokens "
            "that count for example; for all batches of this step it returned 0."
        ),
        "to_host_every=": "Outputs go to the host after so many batches: a whole number from 1 on.",
        "there is nothing to evaluate": (
            "No batch came, or each returned a count of 0: look at the data, or at its masks."
        ),
        "batch_size=": "How many samples a batch has: a whole number from 1 on.",
        "there are no samples to put into batches": "The list of lengths is empty.",
        "chunk_size=": "How many tokens are computed at once: a whole number from 1 on.",
        "window_size=": (
            "How many tokens before a chunk it still sees; with 0 each chunk is computed alone."
        ),
        "optimizer=…: there are": "Take one of the names that the message lists.",
    },
}
INSIDE = "From inside"
INSIDE_SAYS = (
    "These report a wrong call of the C interface (`oracle_offload._core`, "
    "`csrc/include/oracle_offload.h`), or of a state that cannot be. `attach` and what follows "
    "from it make no such call: where one reaches you, it is a bug; report it with the message."
)
OTHERS = "Others"
OTHERS_SAYS = "The message itself has cause and remedy."
RAISED = {
    "OffloadError", "StaleWeightsError", "DriverError", "ValueError", "TypeError",
    "OutOfMemoryError", "FileNotFoundError", "ModuleNotFoundError", "NothingToManage",
    "CheckoutError", "ImportError",
}  # fmt: skip
# Raised and caught within the package: users do not see them.
INTERNAL = ("the driver says …, which cannot be",)


class Site(NamedTuple):
    """One place that raises."""

    kind: str
    message: str
    path: str


def rendered(node: ast.expr) -> str | None:
    """Return the text of a message, with … for what is filled in; None where it is passed on."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (rendered(node.left) or "…") + (rendered(node.right) or "…")
    return None


def python_sites() -> Iterator[Site]:
    """Yield the errors of the package that have a text of their own."""
    for path in sorted((ROOT / "oracle_offload").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            error = node.exc if isinstance(node, ast.Raise) else None
            error = node.value if isinstance(node, ast.Return) else error  # raised by the caller
            if not isinstance(error, ast.Call):
                continue
            called = error.func
            kind = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            message = rendered(error.args[0]) if error.args else None
            if kind in RAISED and message and message not in INTERNAL:
                yield Site(kind, message, path.relative_to(ROOT).as_posix())


STRING = r"\"(?:[^\"\\]|\\.)*\""
FAIL = re.compile(rf"oo__fail(_driver)?\(\s*(OO_\w+),((?:{STRING}|[^\";])*);")
LITERAL = re.compile(rf"{STRING}(?:\s*{STRING})*")
STATUS_KINDS = {
    "OO_E_ARGUMENT": "ValueError",
    "OO_E_MEMORY": "MemoryError",
    "OO_E_DEAD": "DriverError",
    "OO_E_NO_ROOM": "NoRoomError",
}


def c_sites() -> Iterator[Site]:
    """Yield the failures of the C parts that reach Python."""
    for folder in ("base", "core", "driver", "python"):
        for path in sorted((ROOT / "csrc" / folder).glob("*.c")):
            for driver, status, arguments in FAIL.findall(path.read_text("utf-8")):
                # Before the message there may be the names of a call and of its result.
                literal = max(LITERAL.findall(arguments), key=len, default="")
                text = "".join(part[1:-1] for part in re.findall(STRING, literal))
                text = re.sub(r"%(?:0?[0-9.]*)(?:ll|z|l)?[a-zA-Z]", "…", text.replace('\\"', '"'))
                kind = "DriverError" if driver else STATUS_KINDS.get(status, "OffloadError")
                if text:
                    yield Site(kind, text, path.relative_to(ROOT).as_posix())


def sites() -> list[Site]:
    """Return every place that raises, each message once."""
    found: dict[str, Site] = {}
    for site in [*python_sites(), *c_sites()]:
        found.setdefault(site.message, site)
    return list(found.values())


def noted(site: Site) -> tuple[str, str] | None:
    """Return the section and the note of a message."""
    for section, notes in NOTES.items():
        for fragment, note in notes.items():
            if fragment in site.message:
                return section, note
    unreachable = ("which is in no segment of the arena", "is not aligned for")
    inside = site.path.startswith("csrc/") or any(text in site.message for text in unreachable)
    return (INSIDE, "") if inside else None


def entry(site: Site, note: str) -> list[str]:
    """Return the entry of one message."""
    shown = wrap(
        f"{site.kind}: {site.message}", 96, subsequent_indent="    ", break_on_hyphens=False
    )
    out = ["```text", *shown, "```", ""]
    return out + ([*wrap(note, 100, break_on_hyphens=False), ""] if note else [])


def printed() -> str:
    """Return the sections of the page."""
    by_section: dict[str, list[tuple[Site, str]]] = {name: [] for name in (*NOTES, OTHERS, INSIDE)}
    for site in sites():
        section, note = noted(site) or (OTHERS, "")
        by_section[section].append((site, note))
    out = []
    for section, entries in by_section.items():
        if not entries:
            continue
        out += [f"## {section}", ""]
        if section in (OTHERS, INSIDE):
            lead = OTHERS_SAYS if section == OTHERS else INSIDE_SAYS
            out += [*wrap(lead, 100, break_on_hyphens=False), ""]
        # Messages of one cause are together above what is said of it.
        for number, (site, note) in enumerate(entries):
            following = entries[number + 1][1] if number + 1 < len(entries) else None
            said = note if note != following else ""
            out += entry(site, said)
    return "\n".join(out).rstrip() + "\n"


if __name__ == "__main__":
    if "--missing" in sys.argv:
        for place in sites():
            if noted(place) is None:
                print(f"{place.path}: {place.kind}: {place.message}")
    else:
        print(printed(), end="")
