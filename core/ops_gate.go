package core

var gateOps []*Op
