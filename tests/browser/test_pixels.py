"""The playground's pixel worlds in a headless Chromium, against the real server, simulator and packaged world.

SCREENSHOTS names a folder for screenshots, GIF_PIXELS a file for the recording of the docs.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser.test_playground import DESKTOP, base, browser, page, pytestmark, shoot  # noqa: F401 - fixtures, too

image = pytest.importorskip("PIL.Image")


@pytest.fixture
def game(page: Any) -> Any:  # noqa: F811
    """A page that plays Catch from one seed, with the keyboard on the game."""
    page.evaluate("() => { Math.random = () => 0.5; }")
    page.get_by_role("link", name="Pixel worlds").click()
    page.get_by_role("button", name="Play").click()
    page.get_by_text("step 0").wait_for()
    page.locator("#screen:focus").wait_for()
    return page


def until(game: Any, text: str) -> None:
    game.locator("#progress").get_by_text(re.compile(text)).wait_for()


def pixels(game: Any, side: str) -> Any:
    """A side's cells: 10 rows of 5 values."""
    data = game.locator(f"#{side}-canvas").evaluate("canvas => canvas.toDataURL()").partition(",")[2]
    return image.open(io.BytesIO(base64.b64decode(data))).convert("L")


def paddle(game: Any, side: str) -> int:
    drawing = pixels(game, side)
    cell = drawing.width // 5
    row = [drawing.getpixel((cell * x + cell // 2, drawing.height - cell // 2)) for x in range(5)]
    return row.index(255)


def test_one_keyboard_moves_both_sides(game):
    assert game.evaluate("document.activeElement.id") == "screen"
    for step, (key, place) in enumerate([("ArrowLeft", 1), ("0", 0), ("ArrowRight", 1), ("1", 1)], start=1):
        game.keyboard.press(key)
        until(game, f"step {step}$")
        assert (paddle(game, "real"), paddle(game, "imagined")) == (place, place)
    game.keyboard.press("b")
    until(game, "step 3$")
    game.get_by_role("button", name="→").click()
    until(game, "step 4$")
    assert paddle(game, "real") == 2
    assert re.search(r"Diverged in \d of 5 steps", game.locator("#divergence").inner_text())


def test_differing_cells_are_outlined_and_a_fork_mends_them(game):
    outline = [255, 48, 96]

    def outlined(side: str) -> bool:
        script = """(canvas, rgb) => {
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          for (let i = 0; i < data.length; i += 4) if (rgb.every((value, k) => data[i + k] === value)) return true;
          return false; }"""
        return bool(game.locator(f"#{side}-canvas").evaluate(script, outline))

    def change(route: Any) -> None:
        text = route.fetch().text()
        route.fulfill(body=text.replace('"cells": []', '"cells": [[4, 2]]'), content_type="text/event-stream")

    assert not outlined("real")
    game.route("**/v1/games", change)
    game.keyboard.press("1")
    until(game, "step 1$")
    assert outlined("real")
    assert outlined("imagined")
    assert "Cells that differ: 1." in game.locator("#divergence").inner_text()
    shoot(game, "pixels-differ")
    game.unroute("**/v1/games")
    game.get_by_role("button", name="Fork").click()
    game.get_by_text("Cells that differ: 0.").wait_for()
    assert not outlined("real")


def test_agent_plays_until_a_key_takes_over(game):
    game.get_by_role("button", name="Hand to the agent").click()
    until(game, "Episode 2, ")
    assert game.locator("#agent").inner_text() == "Take over"
    game.locator("#screen").focus()
    game.keyboard.press("1")
    game.get_by_role("button", name="Hand to the agent").wait_for()
    game.keyboard.press("n")
    game.wait_for_timeout(1500)  # for the last frame of the agent's
    before = game.locator("#progress").inner_text()
    game.wait_for_timeout(500)
    assert game.locator("#progress").inner_text() == before
    assert before.endswith("step 0")
    shoot(game, "pixels-agent")


@DESKTOP
def test_agent_that_is_stopped_and_asked_again_goes_on(game):
    agent = game.locator("#agent")
    agent.click()
    until(game, "step [1-9]")
    agent.dblclick()
    until(game, "Episode 2, ")
    assert agent.inner_text() == "Take over"
    agent.click()


@DESKTOP
def test_every_key_is_played(game):
    posted: list[str] = []
    game.on("request", lambda request: posted.append(json.loads(request.post_data)["keys"]))
    game.evaluate(
        """() => { for (let i = 0; i < 1200; i += 1) {
          document.getElementById("screen").dispatchEvent(new KeyboardEvent("keydown", { key: "1" }));
        } }"""
    )
    while sum(map(len, posted)) < 1200:
        game.wait_for_timeout(100)
    assert max(map(len, posted)) <= 1000
    assert not game.locator("#pixel-error").is_visible()
    posted.clear()
    game.get_by_label("real time").check()
    game.locator("#screen").focus()
    game.keyboard.press("ArrowLeft")  # down and up before a tick
    while "0" not in posted:
        game.wait_for_timeout(50)
    game.get_by_label("real time").uncheck()


@DESKTOP
def test_skip_link_stays_with_the_game(game):
    game.locator(".skip").press("Enter")
    game.wait_for_url("**/#screen")
    game.reload()
    game.get_by_text("Model: loopwm-small").wait_for()
    game.locator("#screen").wait_for()


def test_real_time_moves_without_a_key(game):
    game.get_by_label("real time").check()
    until(game, "Episode 2, ")
    game.get_by_label("real time").uncheck()


def test_recording_is_a_gif_of_both_sides(game, tmp_path):
    game.get_by_label("World", exact=True).select_option("breakout")
    game.locator("#moves").get_by_text("wait").wait_for()
    game.get_by_role("button", name="Record").click()
    game.get_by_role("button", name="Hand to the agent").click()
    game.locator("#divergence").get_by_text(re.compile(r"of [4-9]\d steps")).wait_for()
    game.get_by_role("button", name="Take over").click()
    game.get_by_role("button", name="Save the GIF").click()
    source = game.locator("#gif img").get_attribute("src")
    path = Path(os.environ.get("GIF_PIXELS", tmp_path / "game.gif"))
    path.write_bytes(base64.b64decode(source.partition(",")[2]))
    with image.open(path) as gif:
        frames = gif.n_frames
        assert frames >= 40
        assert gif.size == (2 * 160 + 8, 160)
        assert gif.info["duration"] == 70
        for number in (0, frames // 2, frames - 1):
            gif.seek(number)
            bottom = [gif.convert("RGB").getpixel((16 * x + 8, 152)) for x in range(10)]
            assert (255, 63, 63) in bottom  # the paddle
    game.locator("#gif img").scroll_into_view_if_needed()
    shoot(game, "pixels-recording")


def test_refused_game_is_shown_and_the_page_goes_on(game):
    refusal = {"error": {"message": "16 of 16 games are open", "type": "invalid_request_error"}}
    game.route("**/v1/games", lambda route: route.fulfill(status=429, json=refusal))
    while game.evaluate("fetch('v1/games', { method: 'POST' }).then(({ status }) => status)") != 429:
        pass  # on a busy machine the route takes a moment to be in force
    game.keyboard.press("1")
    game.get_by_role("alert").get_by_text("16 of 16 games are open (status 429)").wait_for()
    game.unroute("**/v1/games")
    game.keyboard.press("1")
    until(game, "step 1$")
    assert not game.locator("#pixel-error").is_visible()


@DESKTOP
def test_other_world_keeps_its_own_game(game):
    game.keyboard.press("1")
    until(game, "step 1$")
    game.get_by_label("World", exact=True).select_option("breakout")
    until(game, "step 0$")
    assert game.locator("#moves button").all_inner_texts() == ["wait", "←", "→"]
    game.keyboard.press("ArrowRight")
    until(game, "step 1$")
    shoot(game, "pixels-breakout")
    game.get_by_label("World", exact=True).select_option("catch")
    game.get_by_text("Episode 1, step 1").wait_for()
    game.reload()
    game.get_by_role("button", name="Play").click()
    game.get_by_text("Episode 1, step 1").wait_for()
    assert game.locator("#moves button").count() == 3


def test_maze_has_a_button_for_each_action_and_both_sides_agree(game):
    game.get_by_label("World", exact=True).select_option("memory")
    game.locator("#moves button").nth(6).wait_for()
    for step, key in enumerate(["ArrowLeft"] * 4 + ["6"] * 3, start=1):
        game.keyboard.press(key)
        until(game, f"step {step}$")
    assert "Cells that differ: 0" in game.locator("#divergence").inner_text()
    shoot(game, "pixels-memory")
