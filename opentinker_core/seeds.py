"""Every random draw derives from (run seed, purpose, step, group, member, turn).

A draw that depends on anything else (wall clock, batch order, process id) would break replay.
"""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Hash `parts` to a seed in [0, 2**63).

    The parts are joined with a separator that cannot occur inside them, so that
    `derive_seed(1, 23) != derive_seed(12, 3)`.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
