"""From a config file to an experiment: reading, checking, building."""
