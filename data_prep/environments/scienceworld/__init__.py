"""ScienceWorld: the simulator, a way back to a path, and our classes inside its JVM."""

from data_prep.environments.scienceworld.environment import ScienceWorld

ENVIRONMENT = ScienceWorld
