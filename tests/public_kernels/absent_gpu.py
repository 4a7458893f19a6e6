"""What two projects ask of a GPU, answered where there is none, so that their kernels can be interpreted."""

import contextlib
import importlib
import os
import types
from typing import Any

import torch

MULTIPROCESSORS = 2


def properties(*device: Any) -> types.SimpleNamespace:
    """Return the properties of a GPU, as far as the kernels ask."""
    return types.SimpleNamespace(multi_processor_count=MULTIPROCESSORS, major=9, minor=0)


def of_liger_kernel() -> None:
    """Let kernels of liger-kernel that divide their work by multiprocessors find some."""
    importlib.import_module("liger_kernel.ops.dyt").infer_device = lambda: "cuda"
    torch.cuda.get_device_properties = properties


def of_flag_gems() -> None:
    """Let flag-gems be imported: it looks for a GPU, and keeps compiled kernels of one.

    Its launcher, which reuses what Triton's compiler returned, is left out: an interpreted kernel is not compiled. Of
    its two forms of a pointwise kernel the one with plain pointers is taken: Triton 3.9 has no block pointers.
    """
    os.environ |= {"GEMS_VENDOR": "nvidia", "FLAGGEMS_DB_URL": "sqlite://"}
    runtime = importlib.import_module("flag_gems.runtime")
    runtime.torch_device_fn = types.SimpleNamespace(
        current_device=lambda: 0,
        device=lambda *device: contextlib.nullcontext(),
        get_device_name=lambda *device: "absent",
        get_device_capability=lambda *device: (9, 0),
        get_device_properties=properties,
    )
    launcher = importlib.import_module("flag_gems.utils.libentry")
    launcher.libentry = importlib.import_module("flag_gems.utils").libentry = lambda: lambda kernel: kernel
    importlib.import_module("flag_gems.utils.codegen_config_utils").get_codegen_config().prefer_block_pointer = False
