package conform

import (
	"testing"

	"libgdn/core"
)

func runBits(t *testing.T, b core.Backend, setThreads func(n int)) {}
