"""The playground in a headless Chromium, against the real server with the shipped checkpoint.

SERVER_PYTHON runs the server, CHROMIUM is the browser; screenshots go to SCREENSHOTS if that names a folder, and the
recording of the docs to GIF if that names a file.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
EXAMPLES = json.loads((ROOT / "serve/playground/examples.json").read_text(encoding="utf-8"))
SHIPPED = json.loads((ROOT / "loopwm/pretrained/config.json").read_text(encoding="utf-8"))
LOOPS = SHIPPED["default_depth"]
PATIENCE = 60_000
"""Milliseconds for anything to appear: the model decodes on a processor."""
INJECTED = "<img src=x onerror=\"document.title='taken over'\"><b>bold</b>"


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    command = [os.environ["SERVER_PYTHON"], "-m", "serve", "--model", "loopwm/pretrained", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1].removesuffix("/v1")
        server.terminate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=os.environ["CHROMIUM"], args=["--no-sandbox", "--no-proxy-server"]
        )
        yield browser
        browser.close()


@pytest.fixture(params=[(1280, "light"), (390, "dark")], ids=["desktop", "phone"])
def page(request, browser: Any, base: str) -> Iterator[Any]:
    """A fresh page whose console must stay empty of errors but for the answers of status 4xx that a test asks for."""
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if "Security Policy" in said.text else None)
    page.goto(base)
    page.get_by_text("Model: loopwm-small").wait_for()
    yield page
    assert faults == []
    width_needed = page.evaluate("document.documentElement.scrollWidth")
    assert width_needed <= width, "the page scrolls sideways"
    context.close()


def shoot(page: Any, name: str) -> None:
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=f"{folder}/{name}-{page.viewport_size['width']}.png", full_page=True)


def start(page: Any) -> Any:
    """The world that Start made."""
    world = page.locator("section.world").nth(page.locator("section.world").count())
    page.get_by_role("button", name="Start").click()
    world.wait_for()
    return world


def act(world: Any, action: str) -> None:
    """Types an action and waits until its observation is there, shaded."""
    world.get_by_label("Action", exact=False).first.fill(action)
    world.get_by_label("Action", exact=False).first.press("Enter")
    rest(world)
    world.locator("ol.log > li").last.locator(".seen span").first.wait_for()


def rest(world: Any) -> None:
    """Waits until nothing comes any more."""
    world.locator(".waiting").first.wait_for(state="detached")
    world.locator("button:enabled").first.wait_for()


def test_five_steps_a_branch_and_what_the_simulator_said(page):
    world = start(page)
    example = EXAMPLES[0]
    for count, action in enumerate(example["actions"], start=1):
        world.locator(".chips button.next").get_by_text(action, exact=True).click()
        world.locator("ol.log > li").nth(count - 1).locator(".seen span").first.wait_for()
        rest(world)
    assert world.locator(".action").all_inner_texts()[-5:] == example["actions"]
    shares = world.locator(".seen span").evaluate_all("spans => spans.map(span => span.title)")
    shaded = rf"([0-9.]+)\u00a0%, {LOOPS} loops"
    assert all((found := re.fullmatch(shaded, share)) and float(found[1]) <= 100 for share in shares)
    facts = world.locator("ol.log .meta").last.inner_text()
    assert f"{LOOPS} loops to advance" in facts
    assert f"{LOOPS} loops a token" in facts
    assert ("reward" in facts) == SHIPPED["prediction_heads"]
    assert world.get_by_text("predicts neither reward nor the end").is_visible() != SHIPPED["prediction_heads"]
    world.get_by_text("What the simulator said").first.click()
    truth = world.locator("li details .seen").first.inner_text()
    assert truth.split() == example["observations"][0].split()
    shoot(page, "five-steps")
    world.get_by_role("button", name="Branch").click()
    branch = page.locator("section.world").nth(1)
    branch.wait_for()
    shared, wide = branch.locator("ol.log > li").nth(4), page.viewport_size["width"] > 1000
    assert shared.is_visible() == wide
    branch.get_by_role("button", name="the 5 step(s) before the branch").click()
    assert shared.is_visible() != wide
    branch.get_by_role("button", name="the 5 step(s) before the branch").click()
    act(branch, "go to hallway")
    act(world, "look around")
    branch.get_by_text("differs from World 1").wait_for()
    assert page.locator("section.world").first.locator("ol.log > li").count() == 6
    shoot(page, "branch")


def test_an_observation_grows_token_by_token_and_stays_as_it_came(page):
    world = start(page)
    page.evaluate(
        """() => {
          window.seen = [];
          const log = document.querySelector("section.world ol.log");
          const note = () => window.seen.push(log.querySelector("li > .seen")?.textContent ?? "");
          new MutationObserver(note).observe(log, { childList: true, subtree: true });
        }"""
    )
    act(world, "look around")
    seen = [text for text in page.evaluate("window.seen") if text]
    whole = world.locator("li > .seen").evaluate("node => node.textContent")
    assert seen[-1] == whole
    assert all(whole.startswith(text) for text in seen)
    assert len(set(seen)) > 10


def test_without_a_record_the_page_says_that_no_simulator_runs(page):
    world, alone = start(page), "No simulator runs here, and nothing is recorded"
    act(world, EXAMPLES[0]["actions"][0])
    assert not world.get_by_text(alone).is_visible()
    act(world, "wait")
    assert world.get_by_text(alone).is_visible()
    page.get_by_label("Goal").fill("Own text")
    own = start(page)
    act(own, EXAMPLES[0]["actions"][0])
    assert own.get_by_text(alone).is_visible()


def test_several_actions_need_no_observation_between_them(page):
    world = start(page)
    world.get_by_label("show every intermediate observation").uncheck()
    act(world, "look around; inventory")
    assert world.locator("ol.log > li").count() == 2
    assert world.get_by_text("not written out").count() == 1


def test_an_error_is_shown_plainly_and_the_page_goes_on(page, base):
    world = start(page)
    act(world, "look around")
    for found in page.evaluate("fetch('v1/worlds').then(r => r.json())")["data"]:
        page.evaluate("name => fetch(`v1/worlds/${name}`, {method: 'DELETE'})", found["id"])
    world.get_by_label("Action", exact=False).first.fill("open door")
    world.get_by_role("button", name="Imagine").click()
    world.get_by_role("alert").get_by_text("create it again").wait_for()
    shoot(page, "error")
    assert world.locator("ol.log > li").count() == 1
    act(start(page), "look around")


def test_a_service_with_keys_asks_for_one(page):
    def check(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "This service needs a key"}})

    page.route("**/v1/**", check)
    page.reload()
    page.get_by_role("status").get_by_text("This service needs a key (status 401)").wait_for()
    assert page.get_by_label("API key").evaluate("node => node === document.activeElement")
    page.keyboard.type("secret")
    act(start(page), "look around")
    page.get_by_role("status").get_by_text("Model: loopwm-small").wait_for()


def test_markup_stays_text_wherever_it_comes_from(page):
    texts = [INJECTED, f"{INJECTED} again"]

    def answer(route: Any) -> None:
        text = texts.pop(0)
        short = json.dumps({**route.request.post_data_json, "max_tokens": 1})
        parts = route.fetch(post_data=short).text().split("\n\n")[:-2]
        first, *_, reply = [json.loads(part.removeprefix("data: ")) for part in parts]
        tokens = [{"token": text, "logprob": -0.1, "loops": 2}]
        reply["steps"][0] |= {"observation": text, "tokens": tokens, "reward": 2.5, "continuation": 0.75}
        told = [first, {**first, "delta": {"observation": text, "tokens": tokens}}, reply]
        body = "".join(f"data: {json.dumps(data)}\n\n" for data in told) + "data: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    page.get_by_label("Example").select_option("Own text")
    page.get_by_label("Goal").fill(f"Your task: {INJECTED} <|end|>")
    page.get_by_label("First observation").fill(INJECTED)
    page.route("**/step", answer)
    world = start(page)
    act(world, INJECTED.replace(";", ","))
    world.get_by_text("Goal and what was seen").click()
    assert world.locator("li .seen").inner_text() == INJECTED
    assert world.locator("li .action").inner_text() == INJECTED
    assert "reward 2.5 · goes on: 75\u00a0%" in world.locator("ol.log .meta").last.inner_text()
    world.get_by_role("button", name="Branch").click()
    branch = page.locator("section.world").nth(1)
    branch.wait_for()
    act(branch, "look around")
    page.locator("#compare summary").click()
    assert page.locator("#compare mark").all_inner_texts() == [INJECTED, f"{INJECTED} again"]
    assert page.locator("main img:not(#calibration img), main b:not(.legend b), main script").count() == 0
    assert page.title() == "LoopWM playground"
    shoot(page, "injection")


def test_the_description_of_the_api_is_a_page_that_asks_nobody_else(page, base):
    asked: list[str] = []
    page.on("request", lambda sent: asked.append(sent.url))
    page.goto(f"{base}/docs")
    page.get_by_role("heading", name="POST /v1/worlds/{name}/step").wait_for()
    page.get_by_role("link", name="StepBody").first.click()
    assert page.locator("#StepBody tr").first.inner_text().split()[:2] == ["actions", "required"]
    assert all(url.startswith((f"{base}/", "data:")) for url in asked)
    shoot(page, "docs")


def test_everything_is_reached_and_named_from_the_keyboard(page):
    page.get_by_label("Example").focus()
    names = []
    for _ in range(7):
        names.append(page.evaluate("document.activeElement.labels?.[0]?.innerText ?? document.activeElement.innerText"))
        page.keyboard.press("Tab")
    assert names[:3] == ["Example", "Goal", "First observation"]
    page.get_by_role("button", name="Start").focus()
    page.keyboard.press("Enter")
    world = page.locator("section.world").last
    world.wait_for()
    page.keyboard.type("look around")
    page.keyboard.press("Enter")
    world.locator("li .seen span").first.wait_for()
    rest(world)
    assert world.locator("input[id^=action]").evaluate("node => node === document.activeElement")
    page.keyboard.press("ArrowUp")
    assert world.locator("input[id^=action]").input_value() == "look around"
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, textarea, button')]"
        ".filter(e => !(e.labels?.length || e.innerText || e.ariaLabel)).length"
    )
    assert unnamed == 0


DESKTOP = pytest.mark.parametrize("page", [(1280, "light")], indirect=True, ids=["desktop"])


def call(page: Any, path: str, body: dict[str, Any]) -> Any:
    """Post to the API from the page; return the response."""
    script = """async ([path, body]) => (await fetch(path, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) })).json()"""
    return page.evaluate(script, [path, body])


def same_world(page: Any, example: dict[str, Any]) -> str:
    """Create the world that Start makes of an example; return its id."""
    fields = {name: example[name] for name in ("goal", "observation", "history")}
    return str(call(page, "v1/worlds", {"model": "loopwm-small", **fields})["id"])


def percent(share: float) -> str:
    return f"{100 * min(share, 0.999):.{1 if share > 0.995 or share < 0.1 else 0}f}\u00a0%"


def bottom(locator: Any) -> float:
    box = locator.bounding_box()
    return float(box["y"] + box["height"])


@DESKTOP
def test_page_at_1280_by_800_shows_last_observation(page):
    page.set_viewport_size({"width": 1280, "height": 800})
    for number, example in enumerate(EXAMPLES):
        page.get_by_label("Example").select_option(str(number))
        expected = (example["history"] or [example])[-1]["observation"].split()
        last = page.locator("#preview .last")
        assert last.inner_text().split() == expected
        assert bottom(last) <= 800
        world = start(page)
        last, action = world.locator(".last"), world.get_by_label("Action", exact=False).first
        assert last.inner_text().split() == expected
        assert bottom(last) <= bottom(world.locator(".scroll")) + 1
        assert bottom(world.locator(".scroll")) <= bottom(action) <= 800
        if number < len(EXAMPLES) - 1:
            world.get_by_role("button", name="Close").click()
    act(world, EXAMPLES[-1]["actions"][0])
    act(world, EXAMPLES[-1]["actions"][1])
    seen = world.locator("li > .seen").last
    assert 0 < seen.bounding_box()["y"] < bottom(seen) <= bottom(world.locator(".scroll"))
    assert page.evaluate("scrollY") == 0


@DESKTOP
def test_examples_in_the_list_are_named_as_tasks(page):
    names = page.locator("#example option").all_inner_texts()
    assert names[:2] == ["Own text", "Melt tin (ScienceWorld)"]
    assert names[5] == "Find a living thing (ScienceWorld)"
    assert names[-1] == "Look at cd under the desklamp (ALFWorld)"
    assert len(set(names)) == 1 + len(EXAMPLES)


def test_own_text_shows_what_will_not_work(page):
    note, choice = page.get_by_text("fluent nonsense"), page.get_by_label("Example")
    assert not note.is_visible()
    choice.select_option("Own text")
    assert "--memory" in note.inner_text()
    choice.select_option("0")
    assert not note.is_visible()
    page.get_by_label("First observation").fill("You are in a maze of twisty little passages.")
    assert note.is_visible()
    assert page.locator("#preview .last").inner_text() == "You are in a maze of twisty little passages."
    shoot(page, "own-text")


def test_calibration_is_drawn_where_trust_is_explained(page):
    page.get_by_text("How often an answer of a trust is right").click()
    images = page.locator("#calibration img").all()
    assert len(images) == 2
    for image in images:
        image.scroll_into_view_if_needed()
        page.wait_for_function("image => image.complete && image.naturalWidth > 0", arg=image.element_handle())
    shoot(page, "calibration")


@DESKTOP
def test_every_imagined_step_shows_its_trust(page):
    example, world = EXAMPLES[0], start(page)
    for action in example["actions"][:3]:
        act(world, action)
    body = {"actions": example["actions"][:3], "decode": "each", "logprobs": True}
    steps = call(page, f"v1/worlds/{same_world(page, example)}/step", body)["steps"]
    shown = world.locator("li .trust").all_inner_texts()
    assert shown == [f"trust {percent(step['trust'])}" for step in steps]


def test_changes_since_a_similar_observation_are_marked(page):
    world = start(page)  # the history of this example ends with a look around
    act(world, "open cupboard")
    assert world.locator(".change").count() == 0
    act(world, "look around")
    step = world.locator("li").last
    assert "Changed since “look around”" in step.locator(".change").inner_text()
    assert "The cupboard door is closed." in step.locator("del").all_inner_texts()
    added = "".join(step.locator("ins").all_inner_texts())
    assert "The cupboard door is open." in added
    assert "fridge" not in added
    act(world, "look around")
    assert world.locator("li").last.locator("ins, del").count() == 0
    assert world.locator(".change").last.inner_text() == "Nothing changed since “look around”"
    shoot(page, "changes")


def test_comparison_of_branches_marks_what_differs(page):
    world = start(page)
    assert not page.locator("#compare").is_visible()
    act(world, "look around")
    world.get_by_role("button", name="Branch").click()
    branch = page.locator("section.world").nth(1)
    branch.wait_for()
    summary = page.locator("#compare summary")
    assert "are the same" in summary.inner_text()
    act(branch, "open freezer; look around")
    assert "differ" in summary.inner_text()
    summary.focus()
    page.keyboard.press("Enter")
    left, right = page.locator("#left-seen"), page.locator("#right-seen")
    assert [mark.strip() for mark in left.locator("mark").all_inner_texts()] == ["The freezer door is closed."]
    assert "The freezer door is open." in "".join(right.locator("mark").all_inner_texts())
    assert left.inner_text().split() == world.locator("li .seen").last.inner_text().split()
    assert left.bounding_box()["y"] == right.bounding_box()["y"]
    shoot(page, "comparison")
    page.get_by_label("Left branch").select_option(index=1)
    assert "are the same" in summary.inner_text()
    assert page.locator("#compare mark").count() == 0
    branch.get_by_role("button", name="Close").click()
    assert not page.locator("#compare").is_visible()
    start(page)
    assert page.locator("#compare option:checked").all_inner_texts() == ["World 1", "World 3"]


def test_suggestions_show_acceptance_and_are_taken(page):
    example, world = EXAMPLES[0], start(page)
    world.locator(".chips small").first.wait_for()
    actions = world.locator(".chips button > span").all_inner_texts()
    assert {*example["actions"], "open door to hallway", "go to bathroom"} <= {*actions}
    body = {"candidates": actions, "max_tokens": 24}
    results = call(page, f"v1/worlds/{same_world(page, example)}/actions", body)["data"]
    for shown, result in zip(world.locator(".chips small").all_inner_texts(), results, strict=True):
        verdict, _, trust = shown.partition(", trust ")
        assert verdict == ("accepted" if result["accepted"] else "refused")
        assert trust == ("" if result["trust"] is None else percent(result["trust"]))
    world.get_by_role("button", name="open door to hallway").click()
    rest(world)
    assert world.locator("li .action").all_inner_texts() == ["open door to hallway"]
    assert "go to hallway" in world.locator(".chips button > span").all_inner_texts()


@DESKTOP
def test_comparison_takes_another_world_in_place_of_a_closed_one(page):
    first, *_ = [start(page) for _ in range(3)]
    page.locator("#compare summary").click()
    page.get_by_label("Left branch").select_option(index=0)
    first.get_by_role("button", name="Close").click()
    assert page.locator("#compare option:checked").all_inner_texts() == ["World 3", "World 2"]


@DESKTOP
def test_closing_a_world_leaves_another_that_is_imagining(page):
    busy, other = start(page), start(page)
    held: list[Any] = []
    page.route("**/step", lambda route: held.append(route))
    busy.get_by_label("Action", exact=False).first.fill("look around; inventory")
    busy.get_by_role("button", name="Imagine").click()
    busy.locator(".waiting").first.wait_for()
    other.get_by_role("button", name="Close").click()
    assert busy.locator(".waiting").count() == 2
    while not held:
        page.wait_for_timeout(50)
    held[0].continue_()
    rest(busy)
    assert busy.locator("ol.log > li").count() == 2


@DESKTOP
def test_a_suggestion_leaves_what_was_typed(page):
    world = start(page)
    world.get_by_label("Action", exact=False).first.fill("pick up the")
    world.locator(".chips button").first.click()
    rest(world)
    assert world.get_by_label("Action", exact=False).first.input_value() == "pick up the"


def test_a_wrong_depth_is_shown_where_it_was_typed(page):
    summary, depth = page.get_by_text("Depth", exact=True), page.get_by_label("Loops of every pass")
    summary.click()
    depth.fill("0")
    summary.click()
    page.get_by_role("button", name="Start").click()
    depth.wait_for()
    assert page.locator("section.world").count() == 0


@DESKTOP
def test_a_service_with_another_model_is_asked_for_its_name(page):
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "other"}]}))
    page.reload()
    page.get_by_text("Model: other").wait_for()
    page.unroute("**/v1/models")
    page.get_by_role("button", name="Start").click()
    page.get_by_role("alert").get_by_text("'other' does not exist").wait_for()
    page.get_by_text("Model: loopwm-small").wait_for()
    start(page)


@DESKTOP
def test_a_narrow_phone_scrolls_one_way(page):
    page.set_viewport_size({"width": 320, "height": 700})
    start(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


@DESKTOP
def test_a_browser_that_stores_nothing_and_a_key_that_is_none(page):
    page.add_init_script(
        "Object.defineProperty(window, 'sessionStorage', { get() { throw new DOMException('no', 'SecurityError'); } });"
    )
    page.reload()
    page.get_by_text("Model: loopwm-small").wait_for()
    page.get_by_text("API key", exact=True).click()
    page.locator("#key").fill("\u65e5\u672c")
    page.locator("#key").blur()
    page.get_by_role("status").get_by_text("The API key has a character that no key has.").wait_for()


@DESKTOP
def test_suggestions_without_acceptance_can_be_taken(page):
    page.route("**/actions", lambda route: route.fulfill(status=429, json={"error": {"message": "slow down"}}))
    world = start(page)
    world.locator(".chips").get_by_role("button", name="open cupboard").click()
    world.locator("li .seen span").first.wait_for()
    rest(world)
    assert world.locator(".chips small").count() == 0
    assert world.get_by_role("alert").count() == 0


class Recording:
    """Captioned screenshots of a page, written as a GIF."""

    CAPTION = 40
    COLOURS = 128

    def __init__(self, page: Any) -> None:
        self.page = page
        self.frames: list[Any] = []

    def add(self, caption: str, shown: Any) -> None:
        """Scroll an element to the top of the page and take a picture of what is visible."""
        from PIL import Image, ImageDraw, ImageFont

        shown.evaluate("node => scrollTo(0, node.getBoundingClientRect().top + scrollY - 8)")
        picture = Image.open(io.BytesIO(self.page.screenshot(animations="disabled"))).convert("RGB")
        frame = Image.new("RGB", (picture.width, picture.height + self.CAPTION), "#1b1f24")
        frame.paste(picture, (0, self.CAPTION))
        ImageDraw.Draw(frame).text((16, 8), caption, "white", ImageFont.load_default(20))
        self.frames.append(frame)

    def save(self, path: Path, seconds: float) -> None:
        from PIL import Image

        # One palette for all frames: colours that change between frames flicker. Median cut would drop the rare red.
        strip = Image.new("RGB", (self.frames[0].width, sum(frame.height for frame in self.frames)))
        for i, frame in enumerate(self.frames):
            strip.paste(frame, (0, i * frame.height))
        palette = strip.quantize(self.COLOURS, method=Image.Quantize.MAXCOVERAGE)
        frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in self.frames]
        milliseconds = int(1000 * seconds)
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=milliseconds, loop=0, optimize=True)


def test_recording_of_two_branches_is_a_small_gif(browser, base, tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    path = Path(os.environ.get("GIF", tmp_path / "playground.gif"))
    page = browser.new_page(viewport={"width": 760, "height": 640}, color_scheme="light")
    page.set_default_timeout(PATIENCE)
    page.goto(base)
    page.get_by_text("Model: loopwm-small").wait_for()
    page.evaluate("document.body.style.paddingBottom = '100vh'")  # so that any element can be scrolled to the top
    recording = Recording(page)
    recording.add("1. Choose an example and start", page.locator("header"))
    world = start(page)

    def settled(pane: Any) -> None:
        pane.locator(".chips small").first.wait_for()
        page.evaluate("document.activeElement.blur()")

    settled(world)
    recording.add("2. What the agent sees, and suggested actions", world)
    act(world, "open cupboard")
    settled(world)
    recording.add("3. Open the cupboard: imagined, with its trust", world)
    act(world, "look around")
    settled(world)
    recording.add("4. Look around: what is new is underlined", world)
    world.get_by_role("button", name="Branch").click()
    branch = page.locator("section.world").nth(1)
    settled(branch)
    recording.add("5. Branch the world", world)
    act(world, "open freezer")
    settled(world)
    recording.add("6. On the left, open the freezer", world)
    act(branch, "open fridge")
    settled(branch)
    recording.add("7. On the right, open the fridge", world)
    act(world, "look around")
    act(branch, "look around")
    page.locator("#compare summary").click()
    recording.add("8. Look around in both and compare: differences are marked", page.locator("#compare"))
    recording.save(path, seconds=2.5)
    page.context.close()
    with pillow.open(path) as gif:
        assert gif.size[0] == 760
        assert 6 <= gif.n_frames <= 12
    assert path.stat().st_size <= 700_000
