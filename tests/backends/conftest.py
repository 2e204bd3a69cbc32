"""What holds for the tests of backends."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _compiled_here():
    """Compile hundreds of small programs in this process: a child for each costs minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cnnexp.backends.simd.runtime.compilation.compile_in_subprocess", lambda key, described: None)
        yield
