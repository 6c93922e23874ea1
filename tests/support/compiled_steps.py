"""What a trial compiles, without compiling it."""

from kvlab.model import generate


def watch_compiled_steps(monkeypatch):
    """Return the set of rows and tokens of the caches whose compiled steps run, as plain ones."""
    sizes = set()

    def run(model, tokens, step, head):
        sizes.add((len(tokens), step._cache.max_length))
        return generate._run_step(model, tokens, step, head)

    monkeypatch.setattr(generate, "_run_compiled_step", run)
    return sizes
