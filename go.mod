module libgdn

go 1.26
