"""ScienceWorld: the simulator, a way back to a path, and our classes inside its JVM."""
