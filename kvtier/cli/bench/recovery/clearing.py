"""How a server's caches are taken away: by a command, by a request, or by hand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from kvtier.cli.bench.recovery.client import EndpointError
from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from kvtier.cli.bench.recovery.client import Endpoint


@dataclass(frozen=True, slots=True)
class Clearing:
    """One of three ways, exactly."""

    command: str | None = None
    """Run by the shell: it ends when the server was restarted or its caches are empty."""
    post: str | None = None
    """A path of the server to POST to, such as "/reset_prefix_cache"."""
    pause: bool = False
    """Wait for Enter."""

    def check(self) -> None:
        """Raise InvalidRequest unless one way is chosen, and possible."""
        if [self.command is not None, self.post is not None, self.pause].count(True) != 1:
            raise InvalidRequest(
                "say how the server loses its caches, by one of --restart-command CMD (restarts or clears "
                "it), --clear-post /PATH (its own request for that), --pause (you do it by hand)"
            )
        if self.post is not None and not self.post.startswith("/"):
            raise InvalidRequest(f"--clear-post is {self.post!r}, needs a path such as /reset_prefix_cache")
        if self.pause and not sys.stdin.isatty():
            raise InvalidRequest("--pause waits for Enter, but there is no terminal: use --restart-command")

    def clear(self, endpoint: Endpoint, ready_timeout: float) -> str:
        """Clear, wait until the model is served again, and say what was done. Raises EndpointError."""
        if self.command is not None:
            ended = subprocess.run(self.command, shell=True, stdin=subprocess.DEVNULL, check=False)
            if ended.returncode:
                raise EndpointError(f"--restart-command ended with {ended.returncode}: {self.command}")
            done = f"after: {self.command}"
        elif self.post is not None:
            status, body = endpoint.call("POST", self.post)
            if status >= 300:
                raise EndpointError(f"POST {self.post} answered {status}: {body[:300]}")
            done = f"after POST {self.post}"
        else:
            Console(stderr=True).input("Restart the server, or clear its caches; then press Enter. ")
            done = "after a pause for a restart by hand"
        endpoint.wait(ready_timeout)
        return done
