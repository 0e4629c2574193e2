"""Each test must leave the fake CANN without violations and without live descriptors, and the thread where it found it."""

import pytest

import fake

KEPT = "tensor", "scalar", "int array", "tensor list", "executor", "program"


@pytest.fixture(autouse=True)
def strict():
    fake.start(0)
    fake.acl.gdnfake_reset()
    fake.acl.gdnfake_soc(b"Ascend910B2")
    before = {kind: fake.acl.gdnfake_live(kind.encode()) for kind in KEPT}
    yield
    fake.acl.gdnfake_hold(0)
    fake.acl.gdnfake_delay(0)
    found = fake.violations()
    fake.acl.gdnfake_reset()
    after = {kind: fake.acl.gdnfake_live(kind.encode()) for kind in KEPT}
    fake.start(0)
    assert not found
    assert after == before


@pytest.fixture
def expected():
    """What the test itself provoked: the violations since it began are returned and forgotten."""

    def take():
        found = fake.violations()
        fake.acl.gdnfake_reset()
        return found

    return take
