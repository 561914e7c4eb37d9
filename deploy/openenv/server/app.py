"""The server that openenv.yaml names: the packaged checkpoint imagines ScienceWorld."""

from __future__ import annotations

import uvicorn
from server.environment import create_app

from loopwm.worlds.starts import SCIENCEWORLD, read_starts
from loopwm.worlds.vector import make_worlds

app = create_app(make_worlds(None, None, None).fresh, read_starts(SCIENCEWORLD, "observed"))


def main() -> None:
    uvicorn.run(app, host="0.0.0.0", port=8001)


if __name__ == "__main__":
    main()
