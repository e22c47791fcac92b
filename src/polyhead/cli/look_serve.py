"""``polyhead look --serve``: the studio as a web page that only this machine can open."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from polyhead.cli.models import load_any
from polyhead.errors import UnsupportedError

_HOST = "127.0.0.1"


def serve(
    text: str,
    models: Sequence[str],
    placed: tuple[str, str],
    port: int,
    language: str | None = None,
) -> None:
    """Serves until it is interrupted.

    Args:
        text: What the page looks at to begin with; may be empty.
        models: The models that may be chosen, the first by default; after them, the known ones
            that are on this machine.
        placed: Dtype and device of the models.
        language: Language of the page, "en" or "zh"; None: the browser's.

    Raises:
        UnsupportedError: The web framework is not installed.
    """
    try:
        import uvicorn

        from polyhead.viewer.server import application, configuration, new_token
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"look --serve needs {error.name}, of the extra serve: pip install 'polyhead[serve]'"
        ) from error
    from polyhead.viewer.studio import Studio

    studio = Studio(lambda name: load_any(name, *placed), _choices(models))
    token = new_token()
    with socket.create_server((_HOST, port)) as listener:
        bound = listener.getsockname()[1]
        print(f"polyhead look: http://{_HOST}:{bound}/{token}/  (Ctrl-C ends it)", flush=True)
        config = configuration(application(studio, token, text, language))
        uvicorn.Server(config).run(sockets=[listener])


def _choices(models: Sequence[str]) -> list[str]:
    """The model that was asked for, then the known models on this machine."""
    from polyhead.checkpoints.catalogue import available, find

    known = [state.model.name for state in available() if state.found]
    for name in models or known[:1] or ["smollm2"]:
        find(name)  # report missing packages before a page opens
    return list(dict.fromkeys([*models, *known]))
