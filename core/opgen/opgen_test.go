package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestGeneratedFilesAreCurrent(t *testing.T) {
	for _, p := range products {
		got, err := os.ReadFile(filepath.Join("..", "..", p.path))
		if err != nil {
			t.Error(err)
		} else if string(got) != p.write() {
			t.Errorf("%s is not what the table says: run go run ./core/opgen", p.path)
		}
	}
}
