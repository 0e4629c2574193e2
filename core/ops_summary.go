package core

var summaryOps []*Op
