"""Pushes a directory to the Hugging Face hub with the hub's own client (which reads HF_TOKEN and HF_ENDPOINT)."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator


class HubRepository:
    """A model repository on the hub. The constructor creates it if it does not exist, so that mistakes show at once.

    Args:
      name: "organisation/name", or "name" for the token's own account.
      private: whether a new repository is private.

    Raises:
      ValueError: the name is not valid, the token is missing or may not write there, or the hub can't be reached.
    """

    def __init__(self, name: str, *, private: bool = False) -> None:
        from huggingface_hub import HfApi

        self._hub = HfApi()
        with _hub_errors(name, "nothing was exported yet; without --push it needs no hub"):
            self.name = self._hub.create_repo(name, private=private, exist_ok=True).repo_id

    def push(self, directory: pathlib.Path, message: str) -> str:
        """Uploads all files of a directory in one commit. Returns the commit's address. Raises ValueError as above."""
        with _hub_errors(self.name, "what was exported stays where it is"):
            return str(
                self._hub.upload_folder(repo_id=self.name, folder_path=directory, commit_message=message).commit_url
            )


@contextlib.contextmanager
def _hub_errors(name: str, then: str) -> Iterator[None]:
    """Turns the hub's errors into ValueErrors that name the flag and the fix, or `then`, what an unreachable hub means."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalTokenNotFoundError

    try:
        yield
    except HFValidationError as error:
        raise ValueError(f"--push={name} is no name of a repository: write ORGANISATION/NAME ({error})") from error
    except LocalTokenNotFoundError as error:
        raise ValueError(f"--push={name}: there is no token; run `hf auth login` or set HF_TOKEN") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        advice = (
            "; set HF_TOKEN to a token that may write there, or run `hf auth login`" if status in (401, 403) else ""
        )
        raise ValueError(
            f"--push={name}: the hub answers {status} ({error.server_message or error}){advice}"
        ) from error
    except (HTTPError, OSError, RuntimeError) as error:  # RuntimeError: an upload's own
        raise ValueError(f"--push={name}: {type(error).__name__}: {error}; {then}") from error
