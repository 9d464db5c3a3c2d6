"""Uploading a finished export to the model hub."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

from conf import InputError

REFUSED: tuple[type[Exception], ...] = (
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)),
)
"""The last are the error of whatever HTTP client the hub's library uses, and OSError."""


def push(folder: Path, repo_id: str) -> str:
    """Upload `folder` as it is; a repository that does not exist yet is made, and private.

    Args:
        folder: a verified export.
        repo_id: OWNER/NAME.

    Returns:
        Where it is now.

    Raises:
        InputError: if the name is invalid, or the hub refuses or cannot be reached. The folder stays as it was.
    """
    hub = HfApi()
    try:
        hub.create_repo(repo_id, private=True, exist_ok=True)
        commit = hub.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=f"Drafter {folder.name}")
    except REFUSED as error:
        first = str(error).strip().splitlines()[0]
        raise InputError(f"push={repo_id}: {first} The export itself is complete: {folder}") from error
    return str(commit.commit_url)
