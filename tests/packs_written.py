"""Packs of weights are written behind a start, in threads."""

import threading


def wait_for_packs():
    for thread in threading.enumerate():
        if thread.name == "pack-file":
            thread.join()
