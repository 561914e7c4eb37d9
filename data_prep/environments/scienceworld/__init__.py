"""ScienceWorld: the simulator, repair of a gold path, and our classes inside its JVM."""

from data_prep.environments.scienceworld.environment import ScienceWorld

ENVIRONMENT = ScienceWorld
