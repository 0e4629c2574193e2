package core

var kdaOps []*Op
