"""What holds for the tests of backends."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _compiled_here():
    """Compile hundreds of small programs in this process: a child for each, see `simd.apart`, would cost minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cnnexp.backends.simd.runtime.compile_in_subprocess.compile_apart", lambda key, described: None)
        yield
