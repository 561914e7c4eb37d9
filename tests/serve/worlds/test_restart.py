"""A service that is killed and started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fixtures.service import wait_until
from tests.serve.worlds.test_worlds import GOAL


def test_worlds_of_a_service_that_was_killed_in_the_middle_of_their_steps_go_on_as_if_nothing_had_been(
    checkpoint, tmp_path
):
    """The real service, kill -9: what had been answered is there, what had not is there whole or not at all, and every
    world says what one says that is made of the same text."""
    count, told = 16, {}
    stop = threading.Event()
    with Service(checkpoint, tmp_path) as service:
        made = [{"op": "create", "model": "tiny-world", "goal": GOAL, "observation": f"room {i}"} for i in range(count)]
        names = [one["body"]["id"] for one in service.post("worlds:batch", {"requests": made})["data"]]

        def go_on(name: str) -> None:
            for number in range(1000):
                if stop.is_set():
                    return
                try:
                    answer = service.post(f"worlds/{name}/step", {"actions": f"go {number}", "max_tokens": 3})
                except httpx.HTTPError:
                    return
                told[name] = answer["world"]["imagined_steps"]

        threads = [threading.Thread(target=go_on, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        assert wait_until(lambda: len(told) == count and min(told.values()) >= 2, 1200)
        os.kill(service.process.pid, signal.SIGKILL)
        stop.set()
        for thread in threads:
            thread.join()
    with Service(checkpoint, tmp_path) as service:
        for name in names:
            steps = service.get(f"worlds/{name}")["imagined_steps"]
            assert steps in (told[name], told[name] + 1)
            again = service.post("worlds", service.get(f"worlds/{name}/export"))["id"]
            body = {"actions": "look around", "max_tokens": 12}
            said = [service.post(f"worlds/{one}/step", body)["steps"] for one in (name, again)]
            assert said[0][0]["observation"] == said[1][0]["observation"]


@pytest.mark.slow
def test_a_restart_behind_a_supervisors_socket_fails_no_request_and_loses_no_step(checkpoint, tmp_path):
    """The socket is of another process, as systemd's is: connections wait in it while no service runs."""
    statuses: list[int] = []
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener, Service(checkpoint, tmp_path, listener) as service:
        start = {"model": "tiny-world", "goal": GOAL, "observation": "room"}
        names = [service.post("worlds", start)["id"] for _ in range(4)]

        def go_on(name: str) -> None:
            while not stop.is_set():
                body = {"actions": "wait", "max_tokens": 3}
                url = f"{service.url}/worlds/{name}/step"
                try:
                    statuses.append(httpx.post(url, json=body, timeout=None, trust_env=False).status_code)
                except httpx.HTTPError:
                    statuses.append(0)

        clients = [threading.Thread(target=go_on, args=(name,)) for name in names]
        for client in clients:
            client.start()
        assert wait_until(lambda: len(statuses) > len(names), 600)
        service.restart()
        stop.set()
        for client in clients:
            client.join()
        assert set(statuses) == {200}
        assert sum(service.get(f"worlds/{name}")["imagined_steps"] for name in names) == len(statuses)


PASS_ON = """import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
os.execv(sys.argv[2], sys.argv[2:])"""
"""What systemd does with a socket of a unit."""


class Service:
    """`python -m serve` with a checkpoint and a file of worlds, from a folder that is not the project's."""

    def __init__(self, checkpoint: Path, folder: Path, listener: socket.socket | None = None) -> None:
        self.checkpoint, self.folder, self.listener = checkpoint, folder, listener

    def __enter__(self) -> Service:
        options = ["--model", str(self.checkpoint), "--port", "0", "--worlds-file", "worlds.sqlite"]
        command, passed = [sys.executable, "-m", "serve", *options], []
        if self.listener is not None:
            passed = [self.listener.fileno()]
            command = [sys.executable, "-c", PASS_ON, str(passed[0]), *command]
        self.process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, text=True, pass_fds=passed)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split(" on ")[1].strip()
        return self

    def restart(self) -> None:
        assert self.process.stdout is not None
        self.process.terminate()
        assert self.process.wait() == 0
        self.process.stdout.close()
        self.__enter__()

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = httpx.post(f"{self.url}/{path}", json=body, timeout=None, trust_env=False)
        assert response.is_success, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def get(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url}/{path}", timeout=None, trust_env=False).json()
        return answer
