"""The command `train-lora`: an example trainer for a model whose weights do not fit the GPU."""

from __future__ import annotations

import argparse
import json
import sys

from ..trainer.settings import SettingsError, add_arguments, settings_of

__all__ = ["DESCRIPTION", "add_arguments", "run"]

DESCRIPTION = """\
Train a LoRA for a language model of transformers, or for the UNet of a diffusers pipeline, while
the weights stay in page-locked RAM and stream to the GPU.

  oracle-offload train-lora --model ./llama --dataset-file texts.jsonl --steps 200 --output run
  oracle-offload train-lora --config run.yaml
  oracle-offload train-lora --config run.yaml --steps 400 --resume

The output folder gets the adapters (as peft and diffusers read them), state.pt to resume from,
metrics.jsonl (oracle-offload report shows it), previews and result.json."""

_INSTALL = "pip install transformers diffusers peft pyyaml pillow"


def run(args: argparse.Namespace, trained: int, error: int, usage: int) -> int:
    """Run the command; return one of the three exit codes given."""
    try:
        settings = settings_of(args)
    except (SettingsError, OSError) as problem:
        print(f"train-lora: {problem}", file=sys.stderr)
        return usage
    except ModuleNotFoundError as problem:
        print(f"train-lora: {problem}; {_INSTALL}", file=sys.stderr)
        return error
    from ..errors import OffloadError
    from ..explain import explain_oom, is_oom
    from ..trainer.training import train

    try:
        result = train(settings, lambda line: print(line, file=sys.stderr, flush=True))
    except ModuleNotFoundError as problem:
        print(f"train-lora: {problem}; {_INSTALL}", file=sys.stderr)
        return error
    except (SettingsError, OffloadError, OSError) as problem:
        print(f"train-lora: {problem}", file=sys.stderr)
        return usage if isinstance(problem, SettingsError) else error
    except Exception as problem:
        if not is_oom(problem):
            raise
        print(explain_oom(problem), file=sys.stderr)
        print(f"train-lora: {problem}; --resume goes on behind what was saved", file=sys.stderr)
        return error
    print(json.dumps(result, indent=2))
    return trained
