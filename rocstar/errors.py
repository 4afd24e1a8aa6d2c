"""The error tree. One error per boundary crossed; a failed program is data and never appears here.

RocstarError
  ConfigError            the person must change something; names file, line, key, nearest valid key
  DataError              an input file is wrong; names file, line, field
  Unavailable            we are at fault; safe to retry
    EngineUnavailable
    SandboxUnavailable
    VerifierUnavailable
  RunHalted              a run stopped itself on purpose (fault budget passed, disk full); nothing was lost
  ContractBroken         a bug of ours; never caught
"""


class RocstarError(Exception):
    """Base of everything rocstar raises on purpose. `str(error)` is one sentence for a person."""


class ConfigError(RocstarError):
    """The person must change something: a key, a value, a flag, an installed extra."""


class DataError(RocstarError):
    """An input file is wrong; the message names file, line and field."""


class Unavailable(RocstarError):
    """A service of ours failed. Safe to retry; never a reward, never a tool result."""


class EngineUnavailable(Unavailable):
    """The engine could not finish a completion."""


class SandboxUnavailable(Unavailable):
    """The sandbox could not run a program (which says nothing about the program)."""


class VerifierUnavailable(Unavailable):
    """The verifier could not reach a verdict because a worker of ours failed."""


class RunHalted(RocstarError):
    """A run stopped itself on purpose; the message says why and how to go on."""


class ContractBroken(RocstarError):
    """A promise between two rooms was broken: a bug of ours. Never caught."""


def first_line(error: BaseException) -> str:
    """What a library's error says, for a sentence of ours; its type where it says nothing; servers say megabytes."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:1000]
