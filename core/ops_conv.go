package core

var convOps []*Op
