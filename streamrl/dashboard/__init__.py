"""The dashboard: pages in a browser that say how a run is, live or after its end, from its directory alone.

    run directory ──inotify──► hub.py ──events, lines──► state/ (no I/O) ──delta──► frames.py ──SSE──► browsers
    the run's queue ──watch──► live_queue.py ──stats──┘                        app.py ──REST──► (history, timeline)

`state/` is what it knows and decides; `app.py` the routes, `access.py` who may ask, `serve.py` the process, `web/` the
sources of the pages and `static/` what `make dashboard` builds of them. Nothing here is imported by a run.
"""
