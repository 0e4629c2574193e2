package cpu

import (
	"testing"

	"libgdn/core/conform"
)

func TestConform(t *testing.T) { conform.Run(t, New(), SetNumThreads) }
