"""What a user may say: one dataclass per Hydra group, each limit beside its field.

`recipe/checks.py` validates a Recipe by itself, `recipe/compose.py` its keys and types, `plan/`
what a backend forbids, `nemo_config/` what NeMo RL forbids, `correction/quantiles.py` what a
measurement says.

Fields are plain strings and numbers, because a Recipe is also a YAML file, a command line and a
line of a JSON file. `None` in a number of `grpo` inherits the base configuration (`settled.py`).
"""
