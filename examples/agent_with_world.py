"""An agent that tries its ideas in the world model and does the first one that is not refused there.

python examples/agent_with_world.py [http://127.0.0.1:8000/v1]      without an address the model runs in this process
"""

import sys

from loopwm.records.template import Context
from loopwm.worlds.http import Client, HttpWorlds
from loopwm.worlds.local import LocalWorlds
from loopwm.worlds.protocol import Worlds

REFUSED = ("No known action", "Nothing happens", "The door is not open", "The door is already", "It's not clear")
HALL = "This room is called the hallway. In it, you see: \n\tthe agent\n\ta substance called air\n\ta painting\n"
HALL += "You also see:\n\tA door to the kitchen (that is closed)\n\tA door to the workshop (that is closed)"
IDEAS = ["pick up dragon", "open door to kitchen"]

if sys.argv[1:]:
    worlds: Worlds = HttpWorlds(Client(sys.argv[1]), "loopwm-small")
else:
    worlds = LocalWorlds.from_pretrained("loopwm/pretrained")
for idea in IDEAS:
    worlds.begin([Context("Your task is to boil water.", HALL)])
    (imagined,) = worlds.step([idea])
    print(f"> {idea}\n  {imagined.observation}")
    if not imagined.observation.startswith(REFUSED):
        print(f"the agent does: {idea}")
        break
worlds.close()
