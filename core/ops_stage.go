package core

var stageOps []*Op
