package core

var pagedOps []*Op
