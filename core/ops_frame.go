package core

var frameOps []*Op
