"""An experiment as a typed YAML file: its sections, how it is read, its rules, and how an interrupted one is found."""
