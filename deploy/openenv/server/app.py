"""The server that openenv.yaml names: the packaged checkpoint imagines ScienceWorld."""

from __future__ import annotations

import uvicorn

from loopwm.worlds.openenv import create_app, packaged
from loopwm.worlds.starts import SCIENCEWORLD, read_starts

app = create_app(packaged(), read_starts(SCIENCEWORLD, "observed"))


def main() -> None:
    uvicorn.run(app, host="0.0.0.0", port=8001)


if __name__ == "__main__":
    main()
