"""The program of the documentation's section on discovery works as it is written.

The program that starts a run needs the whole stack; `tests/e2e/test_loop.py` runs it.
"""

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.discovery.servers import sent
from tests.gateway.fakes import engine, free_port

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()


async def answer(request: web.Request, payload: dict[str, Any]) -> web.Response:
    return web.json_response({"text": " 4", "path": request.path})


def programs() -> list[str]:
    section = PAGE.partition("## Discovery without the control plane")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


async def output(program: str, file: Path) -> list[str]:
    await asyncio.to_thread(file.write_text, program)
    running = await asyncio.create_subprocess_exec(
        sys.executable,
        str(file),
        cwd=Path(__file__).parents[2],
        env={"PYTHONPATH": "."},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(running.communicate(), 60)
    assert running.returncode == 0, err.decode()
    return out.decode().splitlines()


async def test_the_program_on_discovery_runs_without_a_control_plane(tmp_path: Path) -> None:
    program, _ = programs()
    async with engine(answer) as upstream:
        for written, meant in (
            ("http://127.0.0.1:30000", upstream.url),
            ("8100", str(free_port())),
        ):
            assert written in program
            program = program.replace(written, meant)
        told = await output(program, tmp_path / "program.py")
    assert told == [
        "{'text': ' 4', 'path': '/generate'}",
        "{'text': ' 4', 'path': '/v1/chat/completions'}",
        """b'{"text": " 4", "path": "/generate"}'""",
        "{'text': ' 4', 'path': '/generate'}",
        "{'text': ' 4', 'path': '/generate'}",
    ]
    assert len(upstream.posts) == 5
    keys = [headers.get("X-SMG-Routing-Key") for headers, _ in upstream.posts]
    assert keys == ["prompt-7", None, None, "3 + 3 =", "4 + 4 ="]
    assert sent(upstream) == {"text": "4 + 4 ="}


async def test_the_program_on_several_groups_tells_of_the_one_that_changed(tmp_path: Path) -> None:
    _, program = programs()
    told = await output(program, tmp_path / "program.py")
    keys = "{'code': 'code', 'math': 'math'}"
    assert told == [
        f"{keys} 1 {{'code': 1, 'math': 1}}",
        f"{keys} 1 {{'code': 1, 'math': 1}}",
        f"{keys} 3 {{'code': 1, 'math': 2}}",
    ]
