"""Which model a drafter was trained for."""

from dataclasses import dataclass

from conf import InputError


@dataclass(frozen=True)
class TargetIdentity:
    """What a drafter was trained for. Saved with it and compared before it is used."""

    name: str
    path: str
    revision: str | None
    architecture: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    tokenizer_sha256: str
    weights_sha256: str
    """Over the final norm and the first 64 embedding rows: enough to tell two models apart, cheap to compute."""

    def require(self, found: "TargetIdentity") -> None:
        """Raise InputError unless `found` is the same model with the same tokenizer (names and paths may differ)."""
        for field in (
            "architecture", "hidden_size", "num_hidden_layers", "vocab_size", "tokenizer_sha256", "weights_sha256",
        ):  # fmt: skip
            mine, theirs = getattr(self, field), getattr(found, field)
            if mine != theirs:
                raise InputError(
                    f"the checkpoint was trained for target {self.name} ({field} {mine}), "
                    f"but {found.name} has {field} {theirs}: use the target that it was trained for"
                )
