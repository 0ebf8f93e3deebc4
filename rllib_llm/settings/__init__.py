"""The settings of a run as typed, frozen groups, and how they are read from plain dicts."""
