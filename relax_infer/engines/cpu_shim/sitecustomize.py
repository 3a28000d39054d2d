"""Makes SGLang, transformers and torchvision importable beside a CPU build of torch.

Python imports this file by itself when its folder is on PYTHONPATH. It is meant for processes
that serve or load models on a machine without CUDA, and does nothing until one of the two
packages below is imported:

torchvision
    The wheel on PyPI is a CUDA build whose operators cannot be loaded beside torch for the CPU;
    importing it fails as soon as it registers their shapes. The operators are declared here
    without an implementation: text models never call them.
sglang
    Imports triton at module level, which has no CPU wheel. SGLang carries an import-only
    stand-in for Apple machines; it is switched on here. ``vllm/`` beside this file answers the
    one import that SGLang makes on a platform which it does not know.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

_TORCHVISION_OPERATORS = (
    "nms",
    "qnms",
    *(
        f"{prefix}{pool}{suffix}"
        for pool in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
        for prefix, suffix in (("", ""), ("_", "_backward"))
    ),
    "qroi_align",
)


def _declare_torchvision_operators():
    import torch

    if torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "DEF")
    for operator in _TORCHVISION_OPERATORS:
        library.define(f"{operator}(Tensor x) -> Tensor")
    # The declarations live as long as the library object does.
    torch.library._relax_torchvision_operators = library


def _switch_on_triton_stand_in():
    spec = importlib.machinery.PathFinder.find_spec("sglang")
    if spec is None or spec.origin is None:
        return
    if "triton" in sys.modules or importlib.util.find_spec("triton") is not None:
        return
    source = Path(spec.origin).parent / "_platform_stubs.py"
    stubs_spec = importlib.util.spec_from_file_location("_relax_sglang_stubs", source)
    stubs = importlib.util.module_from_spec(stubs_spec)
    sys.modules[stubs_spec.name] = stubs
    stubs_spec.loader.exec_module(stubs)

    import torch

    # The stand-in installs itself on Apple silicon only: it is shown such a machine, this once.
    has_mps = torch.backends.mps.is_available
    real_sys, real_platform = stubs.sys, stubs.platform
    stubs.sys = types.SimpleNamespace(
        platform="darwin", modules=sys.modules, meta_path=sys.meta_path
    )
    stubs.platform = types.SimpleNamespace(machine=lambda: "arm64")
    torch.backends.mps.is_available = lambda: True
    try:
        stubs.install_platform_stubs()
    finally:
        torch.backends.mps.is_available = has_mps
        stubs.sys, stubs.platform = real_sys, real_platform


class _BeforeImport(importlib.abc.MetaPathFinder):
    """Runs a preparation the first time a package is looked up, and finds nothing itself."""

    def __init__(self, preparations):
        self._preparations = preparations

    def find_spec(self, fullname, path=None, target=None):
        prepare = self._preparations.pop(fullname, None)
        if prepare is not None:
            prepare()


sys.meta_path.insert(
    0,
    _BeforeImport(
        {
            "torchvision": _declare_torchvision_operators,
            "sglang": _switch_on_triton_stand_in,
        }
    ),
)
