"""Reading, checking and building: makes an experiment from a config file."""
