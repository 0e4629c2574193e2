package core

// Version is the library's, the header's and the package's.
const Version = "0.1.0"
