import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["discovery", "gateway", "placement"])
def test_importing_the_package_loads_nothing_heavy(package: str) -> None:
    heavy = ["torch", "ray", "sglang", "aiohttp", "transformers", "temporalio", "uvicorn"]
    code = (
        f"import sys, relax_infer.{package}\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", ["discovery", "gateway", "placement"])
def test_every_exported_name_is_there(package: str) -> None:
    module = __import__(f"relax_infer.{package}", fromlist=["*"])
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018
