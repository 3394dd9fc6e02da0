"""Refuse what would freeze a secret into a run's files: by the name of its key, never by its value.

A plan, a recipe and a job's files are read by others, copied and kept. What a run needs to know
lies in the environment of the node that runs it; there, `cluster.setup` may name it as `$NAME`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

OF_ENVIRONMENT = "oc.env"
NAME = r"(?:token|secret|passwd|password|api_?key|access_?key|private_?key|credentials?)"
SECRET_VARIABLE = re.compile(
    rf"(?:.*_)?(?:{NAME}|pass|pat|pwd|auth|creds)(?:_id)?|.*_key"
    r"|.*(?:token|passwd|password|secret|apikey)",
    re.IGNORECASE,
)
"""Names of environment variables, where `token` means no piece of a text."""
OWNER = (
    "(?:hf|hub|hugging_?face|wandb|git|github|gitlab|ngc|auth|bearer|access|refresh|read|write|api)"
)
SECRET_KEY = re.compile(rf"(?:.*_)?(?!token){NAME}|(?:.*_)?{OWNER}_?token|token", re.IGNORECASE)
PIECES = "nemo.", "model.", "grpo.", "data.", "algorithm.", "correction.", "precision.", "lora."
"""Groups whose keys count tokens, so that `grpo.max_new_token` is a slip of the pen."""
SECRET_VALUE = re.compile(
    r"\b(?:hf_[a-zA-Z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|nvapi-[\w-]{16,}|eyJ[\w-]{10,}\.eyJ[\w-]{10,})"
    r"|://[^\s/:@]+:[^\s/@$]+@"
)
"""How Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS, NVIDIA and web tokens begin theirs; and an
address with a password, `http://name:abc@proxy`."""
GIVEN = re.compile(rf"({NAME}(?:_id)?[\"']?\s*[=:\s]\s*)\S+", re.IGNORECASE)
"""As ` --token abc`, `{api_key: abc`: a value that may go on after its first blank."""
IN_SHELL = re.compile(
    rf"(?:--?{NAME}[=\s]\s*|\bBearer\s+|\bwandb\s+login\s+"
    rf"|\bset(?:env)?\s+\w*(?:{NAME}|key|auth)\s+|\bcurl\s.*(?:-u|--user)[\s=]*[^\s:$]+:"
    r"|\bmysql\s.*(?-i:\s-p))"
    r"(?![\"']?\$)[\"']?\w",
    re.IGNORECASE,
)
"""As `--token abc`, `wandb login abc`, `setenv HF_TOKEN abc`, `aws configure set secret_key abc`,
`curl -u me:abc`, `mysql -pabc`, and not `--token $NAME`."""
ASSIGNED = re.compile(r"\b(\w+)\+?=(?![\"']?\$)(?=[\"']?\w)")
KEPT = (
    "which a run's files would keep; leave it in the environment of the node that runs it, where "
    "cluster.setup may name it as $NAME"
)


def secrets_of_line(words: Iterable[str]) -> Iterator[str]:
    """Name the keys of a command line that hold a secret, before a word is parsed or echoed.

    A word that cannot be parsed is looked at too: `cluster.setup='export HF_TOKEN=...` without its
    last quote. `token` is a piece of a text in the keys below `PIECES`.
    """
    for word in words:
        name, equals, text = word.partition("=")
        key = name.lstrip("+~-")
        if SECRET_VALUE.search(key):
            yield f"a word{' before =' * bool(equals)}: holds what looks like a secret, {KEPT}"
        elif equals:
            looks = _looks_in(key) if key.startswith(PIECES) else SECRET_VARIABLE
            yield from _secrets_at(key, None if text == "null" else text, looks)


def unparsed(word: str, reason: str) -> str:
    """Say that a word cannot be parsed; not with Hydra's reason, which repeats parts of a secret.

    Args:
        word: as it was typed.
        reason: Hydra's.
    """
    if GIVEN.search(word) or SECRET_VALUE.search(word):
        key = word.partition("=")[0]
        return f"{key}: cannot be read, and is not shown, as it may hold a secret"
    return f"{word}: cannot be read, {reason}"


def hidden(text: str) -> str:
    """Return a message of somebody else's about a command line without the secrets typed there."""
    return SECRET_VALUE.sub("***", GIVEN.sub(r"\1***", text))


def secrets_of(values: Mapping[str, Any]) -> Iterator[str]:
    """Name the keys, or what a setup assigns, that hold a secret or look as if they did.

    Args:
        values: dotted keys and leaves, before interpolation.
    """
    for key, value in values.items():
        yield from _secrets_at(key, value, _looks_in(key))


def _looks_in(key: str) -> re.Pattern[str]:
    return SECRET_VARIABLE if key.rpartition(".")[0].endswith("env_vars") else SECRET_KEY


def _secrets_at(key: str, value: Any, looks: re.Pattern[str]) -> Iterator[str]:
    name, text = key.rpartition(".")[2].replace("-", "_"), str(value)
    assigned = [each for each in ASSIGNED.findall(text) if SECRET_VARIABLE.fullmatch(each)]
    if OF_ENVIRONMENT in text:
        yield f"{key}: {OF_ENVIRONMENT} gives it a variable's value, {KEPT}"
    elif value is not None and looks.fullmatch(name):
        yield f"{key}: looks like a secret, {KEPT}"
    elif assigned:
        named = f"which a run's files would keep; export it, and name it: {key}=[{assigned[0]}]"
        kept = named if key == "cluster.env" else KEPT
        yield f"{key}: gives {assigned[0]} a value, {kept}"
    elif SECRET_VALUE.search(text) or (key.startswith("cluster.") and IN_SHELL.search(text)):
        yield f"{key}: holds what looks like a secret, {KEPT}"
